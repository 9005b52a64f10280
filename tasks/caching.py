"""What every task of Eyas shares: when it is retried, under which key its result is kept, and when a kept result stands.

Results are JSON manifests, kept inside the run folder (or a Run Storage block): whoever reaches the data
reaches the results, and a container that went away takes neither. A key covers inputs, the config that matters and the stage's
version; whether the files still exist is deliberately no part of it. `run_standing` looks at the disk
after every hit, so a deleted, damaged or replaced output is made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypedDict

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import exponential_backoff

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError, GateError, ServerError, TooManyRejects
from eyas.files import digest_json
from eyas.manifest import Manifest, verify_manifest

Results = Path | str
"""A folder, or the reference of a Run Storage block, in which task results are kept."""

_NEVER_HEALS = (ConfigError, GateError, TooManyRejects)

SECTIONS = {
    "select": ("target", "prompts", "generation"),
    "generate": ("target", "generation"),
    "merge": ("target", "merging"),
    "extract": ("target", "hidden", "merging"),
    "train": ("target", "draft", "merging"),
    "export": ("target", "draft"),
    "benchmark": ("target", "server", "benchmark"),
}
"""Sections of the config that can change a stage's bytes; those of earlier stages enter through their manifests."""


async def can_heal(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """True if trying again may help: not after a wrong config, a breached gate or too many rejects."""
    failure = await state.aresult(raise_on_failure=False)
    return not isinstance(failure, _NEVER_HEALS)


class TaskOptions(TypedDict):
    """The options that all tasks of Eyas have in common."""

    retries: int
    retry_delay_seconds: Callable[[int], list[float]]
    retry_jitter_factor: float
    retry_condition_fn: Callable[[Task[..., Any], TaskRun, State[Any]], Coroutine[Any, Any, bool]]
    persist_result: bool
    result_serializer: str


OPTIONS: TaskOptions = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": can_heal,
    "persist_result": True,
    "result_serializer": "json",
}


def complete(manifest: Manifest) -> Manifest:
    """The manifest, if nothing is pending: only a finished stage is a result that may be kept; raises `ServerError`."""
    if not manifest.is_complete:
        raise ServerError(
            f"{manifest.stage} {manifest.name}: {manifest.counts.pending:,} of {manifest.counts.num_in:,} records are pending; "
            "run again to continue"
        )
    return manifest


def cache_key(stage: str, version: int = 1) -> Callable[[TaskRunContext, dict[str, Any]], str]:
    """The key function of a stage's task: its parameters are `config`, `inputs` (names to digests) and what names the piece.

    Raise `version` when the task itself, not the library, starts to hand back something else.
    """

    def key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
        config: RunConfig = parameters["config"]
        sections = {name: getattr(config, name).model_dump(mode="json") for name in SECTIONS[stage]}
        piece = parameters.get("dataset") or parameters.get("piece") or ""
        return f"{stage}-" + digest_json(
            {"stage": stage, "version": version, "piece": piece, "inputs": parameters["inputs"], "config": sections}
        )

    return key


def kept_in(results: Results, task: Task[..., Any], *, again: bool = False) -> Task[..., Any]:
    """The task with its results kept in `results`; `again` runs the body even if a result is there."""
    return task.with_options(result_storage=results, refresh_cache=again)


def stands(folder: Path, manifest: Manifest, *, unread: str = "") -> bool:
    """True if the folder still holds exactly what `manifest` accounts for; of files that end like `unread`, the sizes."""
    try:
        return verify_manifest(folder, unread=unread).digest() == manifest.digest()
    except ArtifactError:
        return False


async def run_standing(results: Results, task: Task[..., Any], folder: Path, **parameters: Any) -> Manifest:
    """Run a task that hands back the manifest of `folder`, once more if the kept result no longer stands."""
    manifest: Manifest = await run_task(kept_in(results, task), **parameters)
    if not await asyncio.to_thread(stands, folder, manifest):
        manifest = await run_task(kept_in(results, task, again=True), **parameters)
    return manifest


async def run_task(task: Task[..., Any], **parameters: Any) -> Any:
    """Run a task without blocking the loop: async ones are awaited on it, sync ones go to the flow's task runner."""
    return await task(**parameters) if task.isasync else await finished(task.submit(**parameters))


async def finished(future: Any) -> Any:
    """What a submitted sync task returned, or its exception, awaited without blocking the loop."""
    state = await asyncio.wrap_future(future.wrapped_future)
    return await state.aresult() if isinstance(state, State) else state
