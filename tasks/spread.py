"""Where a phase's sync tasks run: in threads of the flow's process, or on Ray through prefect-ray.

A task, its manifest parameters and its key are the same either way; only the process differs. Ray's workers must
reach the run folder, the target and the Prefect API, and have this package installed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prefect import Task

from eyas.errors import ConfigError
from eyas.operate.config import RunnerConfig
from tasks.caching import run_task

if TYPE_CHECKING:
    from prefect_ray import RayTaskRunner

logger = logging.getLogger(__name__)


class Spread:
    """Runs tasks as `operate.runner` says; Ray is started or connected to by the first task."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._ray: RayTaskRunner[Any] | None = None

    @property
    def is_wide(self) -> bool:
        """True if tasks have processors of their own, so that many may run at once."""
        return self._config.kind == "ray"

    async def run(self, task: Task[..., Any], **parameters: Any) -> Any:
        """What the task returns; raises what it raised."""
        if not self.is_wide:
            return await run_task(task, **parameters)
        runner = await self._runner()
        from prefect_ray.context import remote_options

        with remote_options(num_cpus=self._config.cpus_per_task, num_gpus=self._config.gpus_per_task):
            future = runner.submit(task, parameters)
        state = await asyncio.wrap_future(future.wrapped_future.future())
        return await state.aresult()

    async def each(self, works: list[Coroutine[Any, Any, None]]) -> None:
        """All of the works: side by side on processors of their own, one after the other in this process."""
        if self.is_wide:
            await all_of(works)
            return
        for number, work in enumerate(works):
            try:
                await work
            except BaseException:
                for rest in works[number + 1 :]:
                    rest.close()
                raise

    async def _runner(self) -> RayTaskRunner[Any]:
        async with self._lock:
            if self._ray is None:
                try:
                    from prefect_ray import RayTaskRunner
                except ImportError as error:
                    raise ConfigError("operate.runner.kind is ray, which is not installed; pip install 'eyas[ray]'") from error
                address = self._config.address
                local = {"include_dashboard": False, "log_to_driver": False}
                runner: RayTaskRunner[Any] = RayTaskRunner(address=address or None, init_kwargs={} if address else local)
                runner.__enter__()
                self._ray = runner
            return self._ray

    def close(self) -> None:
        """End the Ray that was started, or leave the cluster."""
        if self._ray is not None:
            self._ray.__exit__(None, None, None)


@asynccontextmanager
async def spread_over(config: RunnerConfig) -> AsyncIterator[Spread]:
    """Somewhere to run tasks while the block runs."""
    spread = Spread(config)
    try:
        yield spread
    finally:
        spread.close()


async def all_of(works: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all, let every one end, then raise the first failure; the others are logged."""
    results = await asyncio.gather(*works, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures[1:]:
        logger.error("also failed error=%r", failure)
    if failures:
        raise failures[0]
    return results
