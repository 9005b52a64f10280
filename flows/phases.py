"""The six phases as the flows run them: which tasks, on which inputs, gated by which manifests.

Every phase takes the manifests of its inputs and gives back its own, so a phase cannot start before what
it reads is complete and verified. A per-phase flow reads the inputs' manifests from the run folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger
from pydantic import SecretStr

from eyas.config import RunConfig, apply_override, parse_config
from eyas.errors import ConfigError
from eyas.files import digest_file
from eyas.manifest import Manifest, verify_manifest
from eyas.operate.config import Mode
from eyas.operate.hosts import host_of
from eyas.operate.phases import Phase
from eyas.operate.pipeline import open_run, phase_end
from eyas.operate.plan import PlanKeeper
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.benchmark import benchmark_draft, benchmark_draft_to_beat
from tasks.caching import Results, kept_in, run_standing, run_task, stands
from tasks.extract import extract_shard, finish_extraction
from tasks.generate import generate_dataset, shared_session
from tasks.merge import merge_responses
from tasks.prepare import prepare_candidates, select_prompts
from tasks.spread import Spread, all_of
from tasks.train import export_draft, train_draft

if TYPE_CHECKING:
    from eyas.generation.session import GenerationSession

Manifests = dict[str, Manifest]


@dataclass(kw_only=True)
class Job:
    """One run as its flow knows it; `api_key` is the servers' and never leaves the process. A decision may change `config`."""

    run: RunFolder
    config: RunConfig
    keeper: PlanKeeper
    results: Results
    spread: Spread
    api_key: str = field(default="", repr=False)

    @property
    def datasets(self) -> list[str]:
        """Names of the datasets, in the config's order; raises `ConfigError` if there is none."""
        names = [dataset.name for dataset in self.config.prompts.datasets]
        if not names:
            raise ConfigError("prompts.datasets is empty; name at least one dataset, or start from a preset")
        return names

    @property
    def shared(self) -> dict[str, Any]:
        """The parameters of every task."""
        return {"run": self.run.root, "config": self.config}

    def apply(self, settings: list[str]) -> None:
        """Change the config by `key=value` settings, for the rest of this run and in its run.json."""
        self.config = with_settings(self.config, settings)
        open_run(self.run.root, self.config)
        self.keeper = PlanKeeper(self.run, self.config)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Record in the plan that a phase runs, has finished, or failed and why."""
        self.keeper.start(name)
        try:
            yield
        except BaseException as error:  # a cancellation, too, must not leave a phase "running"
            self.keeper.fail(name, str(error) or type(error).__name__)
            raise
        self.keeper.finish(name)
        get_run_logger().info(phase_end(self.run, name))


def with_settings(config: RunConfig, settings: list[str]) -> RunConfig:
    """The config with the `key=value` settings of a decision; raises `ConfigError`."""
    raw = config.model_dump(mode="json")
    for setting in settings:
        apply_override(raw, setting)
    return parse_config(raw, where="decision")


async def prepare_phase(job: Job) -> Manifests:
    """Phase 1: candidates per dataset side by side, then one selection."""
    with job.phase("prepare"):
        task = kept_in(job.results, prepare_candidates)
        paths: list[Path] = await all_of([job.spread.run(task, dataset=name, **job.shared) for name in job.datasets])
        inputs = {name: digest_path(path) for name, path in zip(job.datasets, paths, strict=True)}
        for again in (False, True):
            manifests: Manifests = await run_task(kept_in(job.results, select_prompts, again=again), inputs=inputs, **job.shared)
            if all(stands(job.run.prompts(name), manifest) for name, manifest in manifests.items()):
                break
        return manifests


async def benchmark_draft_of_others(job: Job) -> None:
    """The draft to beat, before anything long begins; the plan that is decided on shows it."""
    await run_task(benchmark_draft_to_beat, api_key=SecretStr(job.api_key), **job.shared)
    job.keeper.refresh()


async def generate_phase(
    job: Job, prompts: Manifests, on_dataset: Callable[[str, Manifest], None] = lambda name, manifest: None
) -> Manifests:
    """Phase 2: all datasets together on this event loop, through one session; `on_dataset` hears of each that is complete."""

    async def one(name: str) -> Manifest:
        inputs = {"prompts": prompts[name].digest()}
        folder = job.run.responses(name)
        manifest = await run_standing(job.results, generate_dataset, folder, dataset=name, inputs=inputs, **job.shared)
        on_dataset(name, manifest)
        return manifest

    with job.phase("generate"):
        async with shared_session(lambda: _session(job)):
            manifests = await all_of([one(name) for name in job.datasets])
        return dict(zip(job.datasets, manifests, strict=True))


async def merge_phase(job: Job, responses: Manifests) -> Manifest:
    """Phase 3: one training order over all datasets."""
    with job.phase("merge"):
        return await run_standing(job.results, merge_responses, job.run.merged, inputs=digests(responses), **job.shared)


async def extract_phase(job: Job, responses: Manifests, merged: Manifest) -> Manifest:
    """Phase 4: one task per shard, then the index. If the store no longer stands, every shard is looked at again."""
    with job.phase("extract"):
        for again in (False, True):
            async with _states(job):
                await job.spread.each([extract_dataset(job, name, responses[name], again=again) for name in job.datasets])
            task = kept_in(job.results, finish_extraction, again=again)
            manifest: Manifest = await run_task(task, inputs=digests({**responses, "merged": merged}), **job.shared)
            if stands(job.run.hidden, manifest, unread=".safetensors"):  # those are digested when first read
                break
        return manifest


async def extract_dataset(job: Job, name: str, responses: Manifest, *, again: bool = False) -> None:
    """The shards of one dataset: side by side on processors of their own, one after the other in this process."""
    from eyas.hidden.extract import plan_shards

    plans = await asyncio.to_thread(plan_shards, job.run, job.config, name)
    task = kept_in(job.results, extract_shard, again=again)
    inputs = digests({"responses": responses})
    pieces = [(f"{name} {number}", plan) for number, plan in enumerate(plans)]
    await job.spread.each([job.spread.run(task, plan=plan, piece=piece, inputs=inputs, **job.shared) for piece, plan in pieces])


async def train_phase(job: Job, merged: Manifest, hidden: Manifest) -> Manifest:
    """Phase 5: the trainer, a child process, then the folder that engines load; gives the export's manifest."""
    with job.phase("train"):
        inputs = digests({"merged": merged, "hidden": hidden})
        async with _states(job) if job.config.hidden.disk_budget else nullcontext():
            trained = await run_standing(job.results, train_draft, job.run.draft, inputs=inputs, **job.shared)
        return await run_standing(job.results, export_draft, job.run.export, inputs=digests({"draft": trained}), **job.shared)


async def benchmark_phase(job: Job, export: Manifest) -> Manifest:
    """Phase 6: the draft served and measured."""
    with job.phase("bench"):
        inputs = digests({"export": export})
        return await run_standing(
            job.results, benchmark_draft, job.run.benchmark, inputs=inputs, api_key=SecretStr(job.api_key), **job.shared
        )


def finished_phase(folder: Path, *, checks_digests: bool = True) -> Manifest:
    """The verified manifest of an earlier phase, as the gate of a later one.

    Raises `ArtifactError` if it is missing or damaged, `ConfigError` if records are pending.
    """
    manifest = verify_manifest(folder, checks_digests=checks_digests)
    if not manifest.is_complete:
        raise ConfigError(f"{folder}: {manifest.counts.pending:,} records are pending; finish phase {manifest.stage!r} first")
    return manifest


def finished_datasets(job: Job, folder_of: Callable[[str], Path]) -> Manifests:
    """The verified manifests of one phase for every dataset."""
    return {name: finished_phase(folder_of(name)) for name in job.datasets}


def digests(manifests: Manifests) -> dict[str, str]:
    """Names to digests: how a task's inputs enter its key."""
    return {name: manifest.digest() for name, manifest in manifests.items()}


def digest_path(path: Path) -> str:
    """Digest of a file, or of the manifest of a folder."""
    return digest_file(path / "manifest.json" if path.is_dir() else path)


@asynccontextmanager
async def serving(job: Job, mode: Mode) -> AsyncIterator[list[str]]:
    """The target's servers in `mode` while the block runs; gives their URLs. Waiting for them does not block the loop."""
    host = host_of(job.run, job.config, api_key=job.api_key, say=get_run_logger().info).serving(mode)
    urls = await asyncio.to_thread(host.__enter__)
    try:
        yield urls
    finally:  # not awaited: a cancelled scope would cut it short and leave the engine behind
        host.__exit__(None, None, None)


@asynccontextmanager
async def _states(job: Job) -> AsyncIterator[None]:
    """The host in the mode that gives states, unless servers of their own do."""
    if job.config.hidden.urls:
        yield
        return
    async with serving(job, "extract"):
        yield


@asynccontextmanager
async def _session(job: Job) -> AsyncIterator[GenerationSession]:
    from eyas.generation.session import GenerationSession

    report, say = recorder(job.run.progress), get_run_logger().info
    async with (
        serving(job, "generate") as urls,
        GenerationSession(job.run, job.config, urls=urls, api_key=job.api_key, report=report, say=say) as session,
    ):
        yield session
