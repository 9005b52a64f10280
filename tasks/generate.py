"""Phase 2 as tasks: one per dataset, all on the flow's one event loop, sharing one generation session.

The session (its pool of servers, its scheduler) is opened by the first task that really has to generate,
so a run whose responses are all there starts no engine. Tasks find it through a context variable: it is
never a parameter, never a result. A task that is retried joins the open session again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key, complete

if TYPE_CHECKING:
    from eyas.generation.session import GenerationSession

OpenSession = Callable[[], AbstractAsyncContextManager["GenerationSession"]]

_SESSIONS: ContextVar[SharedSession] = ContextVar("generation_sessions")


class SharedSession:
    """A session that is opened once, on first use, and closed with the block that made it."""

    def __init__(self, open_session: OpenSession, stack: AsyncExitStack) -> None:
        self._open_session = open_session
        self._stack = stack
        self._lock = asyncio.Lock()
        self._session: GenerationSession | None = None

    async def get(self) -> GenerationSession:
        """The open session; opens it if nobody has."""
        async with self._lock:
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._open_session())
            return self._session


@asynccontextmanager
async def shared_session(open_session: OpenSession) -> AsyncIterator[None]:
    """While the block runs, `generate_dataset` tasks awaited in it share what `open_session()` opens."""
    async with AsyncExitStack() as stack:
        token = _SESSIONS.set(SharedSession(open_session, stack))
        try:
            yield
        finally:
            _SESSIONS.reset(token)


@task(**OPTIONS, name="generate", task_run_name="generate {dataset}", cache_key_fn=cache_key("generate"))
async def generate_dataset(run: Path, config: RunConfig, dataset: str, inputs: dict[str, str]) -> Manifest:
    """Generate the target's responses to one dataset through the shared session."""
    if (finished := _finished(RunFolder(run), config, dataset)) is not None:
        return finished
    session = await _SESSIONS.get().get()
    return complete(await session.generate_dataset(dataset))


def _finished(run: RunFolder, config: RunConfig, dataset: str) -> Manifest | None:
    """The dataset's manifest if all its responses are there and whole: no server need start for it. Needs the running loop."""
    from eyas.generation.dataset import DatasetRun, check_rejects
    from eyas.generation.sampling import resolve_sampling
    from eyas.target.spec import load_target

    spec = load_target(config.target)
    work = DatasetRun(run, config, spec, resolve_sampling(config.generation, spec), dataset, str)
    manifest = work.finished_manifest()
    return manifest if manifest is None else check_rejects(manifest, config.generation.reject_limit, work.folder)
