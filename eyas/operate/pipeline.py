"""The whole run as plain library code: six phases in order, each finished before the next begins.

No orchestrator is needed; the Prefect flows call the same phase functions. A phase whose finished
manifest fits its inputs returns at once, a damaged or missing file is redone, and a run killed at any
point continues where it stood. The embedded engine lives only while responses are generated, and
training runs in a child process, so that each phase has the machine to itself.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.config import RunConfig
from eyas.errors import ConfigError, EyasError, TooManyRejects
from eyas.files import write_json
from eyas.manifest import Manifest
from eyas.operate.baseline import benchmark_baseline
from eyas.operate.children import child_process, last_lines, wait_for
from eyas.operate.decision import Ask, decide, nobody_answers
from eyas.operate.following import follow_progress
from eyas.operate.forecast import sizes_of
from eyas.operate.hosts import Say, TargetHost, host_of, sides_of
from eyas.operate.phases import PHASES, Phase
from eyas.operate.plan import PlanKeeper
from eyas.operate.screen import describe_end
from eyas.operate.status import read_status
from eyas.progress import Progress, Report, recorder, silent
from eyas.target.spec import load_target
from eyas.workspace import RunFolder, exclusive

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "pandas", "numpy", "httpx", "pydantic", "prefect")


def open_run(root: Path, config: RunConfig) -> RunFolder:
    """Make or take up the run folder and write `run.json`: config, versions, target fingerprint.

    A changed config is allowed: the fingerprints of the phases decide what is redone. Whoever calls holds the run (`held`), for
    the run's children read their config there. Raises `ConfigError`.
    """
    run = RunFolder(root).create()
    spec = load_target(config.target)
    if config.draft.baseline or config.draft.warm_start:  # a draft that does not fit fails now, not after days
        from eyas.draft.baseline import import_baseline

        import_baseline(run, config, spec)
    write_json(
        run.run_json,
        {
            "config": config.model_dump(mode="json"),
            "eyas_version": __version__,
            "packages": installed_packages(),
            "target_fingerprint": spec.fingerprint,
            "target": sizes_of(spec).model_dump(),
        },
    )
    return run


def held(run: RunFolder) -> AbstractContextManager[None]:
    """One process at a time writes a run; raises `ConfigError` with the holder's pid."""
    return exclusive(run.root / ".lock", f"run {run.root}")


def run_pipeline(
    run: RunFolder,
    config: RunConfig,
    *,
    phases: Sequence[Phase] = PHASES,
    report: Report = silent,
    api_key: str = "",
    say: Say = print,
    ask: Ask = nobody_answers,
) -> dict[str, Any]:
    """Record the config and run `phases` in the pipeline's order; gives each phase's manifest (one per dataset for the first two).

    `say` tells the operator something, `ask` asks for the decision before the long phases.
    Raises the phase's own `EyasError`; everything finished so far stays and is taken up by the next run.
    """
    done: dict[str, Any] = {}
    with held(run):
        open_run(run.root, config)
        keeper = PlanKeeper(run, config)
        work = _Work(run, config, api_key, say, both(recorder(run.progress), both(report, keeper.on_progress)))
        for phase in [phase for phase in PHASES if phase in phases]:
            if phase == "generate":
                benchmark_baseline(run, config, api_key=api_key, say=say)
                decide(keeper, config, ask)
            keeper.start(phase)
            try:
                done[phase] = _STEPS[phase](work)
            except EyasError as error:
                keeper.fail(phase, str(error))
                raise
            keeper.finish(phase)
            say(phase_end(run, phase))
    return done


@dataclass(frozen=True)
class _Work:
    run: RunFolder
    config: RunConfig
    api_key: str = field(repr=False)
    say: Say
    report: Report

    def host(self) -> TargetHost:
        """Whoever brings the target's servers into a mode."""
        return host_of(self.run, self.config, api_key=self.api_key, say=self.say)


def _prepare(work: _Work) -> dict[str, Manifest]:
    from eyas.prompts.prepare import prepare

    return prepare(work.run, work.config, report=work.report)


def _generate(work: _Work) -> dict[str, Manifest]:
    return asyncio.run(_generate_unless_finished(work))


async def _generate_unless_finished(work: _Work) -> dict[str, Manifest]:
    from eyas.generation.session import generate

    finished = _finished_responses(work.run, work.config)
    if finished is not None:  # no server need start for nothing
        return finished
    with work.host().serving("generate") as urls:
        return await generate(work.run, work.config, urls=urls, api_key=work.api_key, report=work.report, say=work.say)


def _finished_responses(run: RunFolder, config: RunConfig) -> dict[str, Manifest] | None:
    from eyas.generation.dataset import DatasetRun, check_rejects
    from eyas.generation.sampling import resolve_sampling

    spec = load_target(config.target)
    sampling = resolve_sampling(config.generation, spec)
    manifests = {}
    for dataset in config.prompts.datasets:
        work = DatasetRun(run, config, spec, sampling, dataset.name, str)
        if (manifest := work.finished_manifest()) is None:
            return None
        manifests[dataset.name] = check_rejects(manifest, config.generation.reject_limit, work.folder)
    return manifests


def _merge(work: _Work) -> Manifest:
    from eyas.merging.merge import merge

    return merge(work.run, work.config, report=work.report)


def _extract(work: _Work) -> Manifest:
    from eyas.hidden.extract import extract

    with _extracting(work):
        return extract(work.run, work.config, report=work.report)


def _extracting(work: _Work) -> AbstractContextManager[Any]:
    """Servers that give states, if they are not servers of their own; also what frees the processors for our own source."""
    return nullcontext() if work.config.hidden.urls else work.host().serving("extract")


def _train(work: _Work) -> Manifest:
    with _extracting(work) if work.config.hidden.disk_budget else nullcontext():
        train_in_child(work.run, report=work.report)
    from eyas.draft.export import export_draft

    return export_draft(work.run, work.config)


def _bench(work: _Work) -> Manifest:
    from eyas.speculate.benchmark import benchmark

    serve = sides_of(work.host(), work.run.export)
    return benchmark(work.run, work.config, report=work.report, api_key=work.api_key, serve=serve)


_STEPS: dict[Phase, Callable[[_Work], Any]] = {
    "prepare": _prepare,
    "generate": _generate,
    "merge": _merge,
    "extract": _extract,
    "train": _train,
    "bench": _bench,
}


def phase_end(run: RunFolder, phase: Phase) -> str:
    """What became of a phase that has just finished, as a sentence."""
    return describe_end(next(item for item in read_status(run.root).phases if item.phase == phase))


def train_in_child(run: RunFolder, *, report: Report = silent) -> None:
    """Train as `python -m eyas.draft.train`, with its log in `logs/train.log` and its progress passed on.

    The child ends with us. Raises the family of its exit code, with the last line of its log.
    """
    look = follow_progress(run.progress, report, stage="train")
    in_child(["-m", "eyas.draft.train", "--run", str(run.root)], log=run.logs / "train.log", look=look, what="training")


def in_child(arguments: Sequence[str], *, log: Path, look: Callable[[], None], what: str) -> None:
    """Run Python with `arguments` to its end, its output in `log`, with `look` called now and then; the child ends with us.

    Raises the family of its exit code, with the last line of its log.
    """
    with child_process([sys.executable, *arguments], log=log) as process:
        code = wait_for(process, look)
    if code:
        family = {2: ConfigError, 3: TooManyRejects}.get(code, TrainingFailed)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}: {last_lines(log) or 'no output'}"
        raise family(f"{what} {how} (log {log}); run the same command again to continue from the last checkpoint")


class TrainingFailed(EyasError):
    """The trainer's process ended with an error; its checkpoints are kept and the next run resumes from them."""


def installed_packages() -> dict[str, str]:
    """Versions of the packages that shape a run's results, and of Python."""
    versions = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def both(first: Report, second: Report) -> Report:
    """A listener that passes on to two."""

    def listen(progress: Progress) -> None:
        first(progress)
        second(progress)

    return listen
