"""The points of a learning curve: the run's own training, on the first n of its records, for all and for some of its steps.

`python -m eyas.draft.curve --run DIR --to DIR --total N --records n1 n2 …` is the child process. The order is shuffled,
so its first n entries are an honest sample; map and held-out replies are the same for every point. A point is
`points.json` in its folder, written last; one that is there is not trained again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eyas.config import RunConfig, parse_config
from eyas.draft.baseline import replay_baseline, starting_weights
from eyas.draft.config import DraftConfig
from eyas.draft.corpus import Corpus
from eyas.draft.export import training_spec
from eyas.draft.metrics import METRICS
from eyas.draft.power_law import Point
from eyas.draft.train import Interrupted, stop_signals
from eyas.draft.trainer import Trainer
from eyas.errors import ArtifactError, EyasError
from eyas.files import digest_json, read_json, read_json_lines, write_json
from eyas.manifest import verify_manifest
from eyas.progress import Progress, Report, recorder
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

STEP_SHARES = (0.25, 1.0)
"""Each size is trained for these shares of its steps, each with a whole schedule: that tells steps from records."""
REPLAYS = 2
POINTS = "points.json"


def train_points(
    run: RunFolder,
    config: RunConfig,
    sizes: Sequence[int],
    total: int,
    to: Path,
    report: Report,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Train on the first `sizes` records of `run`'s order, as a training on `total` records would; writes `points.json` in `to`.

    Returns the points, smallest first, and the baseline's replay on the same held-out replies (None without one). Raises
    `ArtifactError` without held-out replies and `Interrupted` if asked to stop; the same call continues.
    """
    target = load_target(config.target)
    corpus = Corpus.open(run)
    if not corpus.heldout:
        raise ArtifactError(
            f"{run.merged} holds no held-out reply yet; a learning curve is measured on them: wait for more replies"
        )
    verify_manifest(run.hidden, checks_digests=False)
    alone = config.draft.model_copy(update={"processes": 1, "hosts": 1, "zero_stage": 0})
    work = [(size, share) for size in sorted(sizes) for share in STEP_SHARES]
    points = []
    for number, (size, share) in enumerate(work):
        part = replace(corpus, train=corpus.train[:size])
        steps = num_steps(part, alone, total)
        draft = alone.model_copy(update={"max_steps": max(1, round(steps * share)), "patience": 0})
        draft = draft.model_copy(update={"eval_every": math.ceil(draft.max_steps / REPLAYS)})
        points.append(
            _train(run, config.model_copy(update={"draft": draft}), target, part, to / f"{size}-{draft.max_steps}", should_stop)
        )
        report(
            Progress(stage="learning-curve", done=number + 1, total=len(work), unit="trainings", is_final=number + 1 == len(work))
        )
    result = {"points": [asdict(point) for point in points], "baseline": replay_baseline(run, config, target, corpus)}
    write_json(to / POINTS, result)
    return result


def num_steps(corpus: Corpus, config: DraftConfig, total: int) -> int:
    """Optimizer steps that this part of `total` records gets; a fixed `max_steps` is shared out in proportion."""
    if config.max_steps:
        return max(1, round(config.max_steps * len(corpus.train) / total))
    batches = len(corpus.epoch(0, config.seed, config.batch_tokens))
    return max(1, round(config.epochs * math.ceil(batches / config.accumulate)))


def _train(
    run: RunFolder, config: RunConfig, target: TargetSpec, part: Corpus, folder: Path, should_stop: Callable[[], bool]
) -> Point:
    trainer = Trainer(
        folder=folder,
        corpus=part,
        target=target,
        spec=training_spec(run, config, target, len(part.d2t)),
        start=starting_weights(run, config, part.d2t),
        config=config.draft,
        num_draft_tokens=config.benchmark.num_draft_tokens,
        fingerprint=digest_json([part.train, config.draft.model_dump(mode="json"), target.fingerprint]),
    )
    if not trainer.run(lambda progress: None, should_stop):
        raise Interrupted(f"the learning curve of {run.root} stopped at {folder.name}; run the same command to continue")
    rows: list[dict[str, Any]] = [json.loads(line) for _, line in read_json_lines(folder / METRICS)]
    best = max((row for row in rows if row["kind"] == "heldout"), key=lambda row: float(row["accept_length"]))
    return Point(
        records=len(part.train),
        steps=trainer.state.step,
        accept_length=best["accept_length"],
        verifications=best["verifications"],
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry of the child process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eyas.draft.curve", description="Train the points of a learning curve.")
    parser.add_argument("--run", type=Path, required=True, help="run folder with merged order and hidden states")
    parser.add_argument("--to", type=Path, required=True, help="folder of the points")
    parser.add_argument("--total", type=int, required=True, help="records of the whole run")
    parser.add_argument("--records", type=int, nargs="+", required=True, help="sizes of the points")
    options = parser.parse_args(arguments)
    run = RunFolder(options.run)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        config = parse_config(read_json(run.run_json)["config"], where=str(run.run_json))
        stopped = stop_signals()
        train_points(run, config, options.records, options.total, options.to, recorder(options.to), lambda: bool(stopped))
    except EyasError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
