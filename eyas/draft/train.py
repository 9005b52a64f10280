"""Phase 5: train the draft of a run, resumable to the bit, and select it by held-out replay.

`python -m eyas.draft.train --run DIR` is the child process: config from `run.json`, SIGTERM or SIGINT saves
after the running step and exits with 130. It starts `draft.processes` of itself, or is one of those that
`torchrun` or `deepspeed` started. A run with equal inputs and settings that is finished is left alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

from eyas.config import RunConfig, parse_config
from eyas.draft.baseline import import_baseline, replay_baseline, starting_weights
from eyas.draft.checkpoint import MODEL, named_checkpoint
from eyas.draft.corpus import Corpus
from eyas.draft.export import training_spec
from eyas.draft.launch import launch
from eyas.draft.trainer import Trainer
from eyas.draft.world import World, joined, own_device
from eyas.errors import ArtifactError, EyasError
from eyas.files import read_json
from eyas.hidden.window import open_store, shared_threads
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, now, verify_manifest
from eyas.progress import Report, recorder, silent
from eyas.target.spec import load_target
from eyas.workspace import RunFolder, exclusive

logger = logging.getLogger(__name__)

VERSION = 1
STAGE = "train"
_NOT_IN_FINGERPRINT = {
    *("baseline", "threads", "keep_checkpoints", "log_every", "tensorboard", "wandb_project"),
    *("recompute", "processes", "hosts", "rendezvous", "zero_stage"),  # the same curve to rounding
}


class Interrupted(EyasError):
    """Training was asked to stop; its state is saved and the same command continues it."""

    exit_code = 130


def train(
    run: RunFolder,
    config: RunConfig,
    report: Report = silent,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    world: World | None = None,
) -> Manifest:
    """Train until the steps are done, patience is out, or `should_stop()`; returns the manifest of `draft/`.

    Every process of `world` calls this; the run folder must be the same for all of them.

    Raises `ArtifactError` for inputs that do not verify, `Interrupted` after saving, `EyasError` for a loss
    that is not finite.
    """
    world = world or World(device=own_device())
    inputs = world.same(
        lambda: {
            "merged": verify_manifest(run.merged).digest(),
            "hidden": verify_manifest(run.hidden, checks_digests=False).digest(),
        }
    )
    target = load_target(config.target)
    imported = world.same(lambda: import_baseline(run, config, target))
    if imported is not None:
        inputs["baseline"] = imported.digest()
    settings = {
        **config.draft.model_dump(mode="json", exclude=_NOT_IN_FINGERPRINT),
        "target": target.fingerprint,
        "num_draft_tokens": config.benchmark.num_draft_tokens,
    }
    print_ = fingerprint(STAGE, VERSION, inputs=inputs, config=settings)
    with exclusive(run.draft / ".lock", f"the training of {run.root}") if world.is_first else nullcontext():
        finished = world.same(lambda: finished_manifest(run.draft, print_))
        if finished is not None:
            return finished
        (run.draft / "manifest.json").unlink(missing_ok=True)
        started_at = now()
        store = open_store(run, config)
        threads = shared_threads(config)[1] if config.hidden.disk_budget else config.draft.threads
        corpus = Corpus.open(run, store)
        baseline = world.same(lambda: replay_baseline(run, config, target, corpus))
        trainer = Trainer(
            folder=run.draft,
            corpus=corpus,
            target=target,
            spec=training_spec(run, config, target, len(corpus.d2t)),
            start=starting_weights(run, config, corpus.d2t),
            config=config.draft.model_copy(update={"threads": threads}),
            num_draft_tokens=config.benchmark.num_draft_tokens,
            fingerprint=print_,
            world=world,
        )
        with closing(store):
            is_done = trainer.run(report if world.is_first else silent, should_stop)
        if not is_done:
            raise Interrupted(f"training of {run.root} stopped at step {trainer.state.step}; run the same command to continue")
        refused = store.refused() & set(corpus.train)
        reasons = {"no_supervised_token": len(corpus.unsupervised), "no_states": len(corpus.without_states) + len(refused)}

        def write_manifest() -> Manifest:
            best = named_checkpoint(run.draft / "checkpoints", "best")
            return Manifest(
                stage=STAGE,
                stage_version=VERSION,
                fingerprint=print_,
                inputs=inputs,
                config=settings,
                counts=Counts.of(done=len(set(corpus.train) - refused), rejected=sum(reasons.values())),
                rejected_by_reason={reason: count for reason, count in reasons.items() if count},
                files=file_entries(run.draft, [f"checkpoints/{best.name}/{MODEL}", "checkpoints/best"]),
                figures=trainer.figures() | store.figures() | ({"baseline": baseline} if baseline else {}),
                started_at=started_at,
            ).write(run.draft)

        return world.same(write_manifest)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the child process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eyas.draft.train", description="Train the draft of a run folder.")
    parser.add_argument("--run", type=Path, required=True, help="run folder; the config is read from its run.json")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="given by the deepspeed launcher; not used")
    run = RunFolder(parser.parse_args(arguments).run)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        raw = read_json(run.run_json)
        if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
            raise ArtifactError(f"{run.run_json} holds no config; start the run with eyas run --run {run.root}")
        config = parse_config(raw["config"], where=str(run.run_json))
        if "RANK" not in os.environ and config.draft.processes * config.draft.hosts > 1:
            return launch(run.root, config.draft, _rank)
        stopped = stop_signals()
        with joined() as world:
            train(run, config, recorder(run.progress), should_stop=lambda: bool(stopped), world=world)
    except EyasError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _rank(run: str) -> None:
    """One process of a launch. It ends by its exit code: one that returns waits for a launcher that may be ending."""
    if code := main(["--run", run]):
        sys.exit(code)


def stop_signals() -> list[int]:
    """Signals received from now on that ask to stop."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda seen, frame: stopped.append(seen))
    return stopped


if __name__ == "__main__":
    sys.exit(main())
