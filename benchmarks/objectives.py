"""What each objective, step weight and start of the draft gives at equal CPU time, on the states of a finished run.

    python -m benchmarks.objectives --run RUN --to DIR [--steps 600] [--only NAME …]

Every variant is the run's own training but for the settings of its name, with a whole schedule of its own, on one thread.
What a step costs with each objective is measured first, in alternation on the same batches, and each variant gets the
steps that cost as much as `--steps` of the default. Two seeds of the default show what is noise. Each variant is kept in
DIR when it is done, and one that was interrupted continues; RUN is only read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.config import RunConfig, parse_config
from eyas.draft import initial
from eyas.draft.config import DraftConfig
from eyas.draft.corpus import Corpus
from eyas.draft.export import training_spec
from eyas.draft.metrics import METRICS, Window
from eyas.draft.trainer import HIT_EVERY, Trainer
from eyas.files import digest_json, read_json, read_json_lines, write_json
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

DEFAULT = "soft_ce-0.8"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {"objective": "soft_ce", "step_decay": 0.8},
    "overlap-0.8": {"objective": "overlap", "step_decay": 0.8},
    "soft_ce-1.0": {"objective": "soft_ce", "step_decay": 1.0},
    "overlap-1.0": {"objective": "overlap", "step_decay": 1.0},
    "soft_ce-0.8-seed-1": {"objective": "soft_ce", "step_decay": 0.8, "seed": 1},
    "soft_ce-0.8-random-fc": {"objective": "soft_ce", "step_decay": 0.8},
}
UNSOLVED = "random-fc"
"""Variants of this name start from the target's norm and head rows alone; the others from the solved start."""
TIMED_STEPS = 12
REPLAYS = 3


class Bench:
    """The states of one run, and the trainings made of them in `to`."""

    def __init__(self, run: RunFolder, config: RunConfig, to: Path) -> None:
        self.run, self.config, self.to = run, config, to
        self.target, self.corpus = load_target(config.target), Corpus.open(run)

    def trainer(self, folder: Path, draft: DraftConfig) -> Trainer:
        return Trainer(
            folder=folder,
            corpus=self.corpus,
            target=self.target,
            spec=training_spec(self.run, self.config, self.target, len(self.corpus.d2t)),
            config=draft,
            num_draft_tokens=self.config.benchmark.num_draft_tokens,
            fingerprint=digest_json([folder.name, draft.model_dump(mode="json"), self.corpus.train]),
        )

    def draft(self, **changes: Any) -> DraftConfig:
        alone = {"threads": 1, "processes": 1, "hosts": 1, "zero_stage": 0, "patience": 0, "keep_checkpoints": 1}
        return self.config.draft.model_copy(update=alone | changes)

    def costs(self) -> dict[str, float]:
        """CPU time of a step by objective, relative to the default's: medians of steps that take turns on one batch each."""
        path = self.to / "costs.json"
        if not path.is_file():
            with tempfile.TemporaryDirectory() as folder:
                trainer = self.trainer(Path(folder), self.draft(max_steps=1000))
                found: dict[str, list[float]] = {"soft_ce": [], "overlap": []}
                for group in islice(trainer._groups(), TIMED_STEPS):
                    for objective, seconds in found.items():
                        trainer.config = self.draft(max_steps=1000, objective=objective)
                        trainer.state.step = HIT_EVERY + 1  # most steps count no hits
                        begun = time.process_time()
                        trainer._step(group, Window())
                        seconds.append(time.process_time() - begun)
            ratios = [other / own for own, other in zip(found["soft_ce"], found["overlap"], strict=True)]
            write_json(path, {"soft_ce": 1.0, "overlap": round(statistics.median(ratios), 4)})
        costs: dict[str, float] = read_json(path)
        return costs

    def train(self, name: str, steps: int) -> dict[str, Any]:
        """The result of one variant, trained where it is not kept yet."""
        path = self.to / f"{name}.json"
        if not path.is_file():
            settings = VARIANTS[name]
            steps = round(steps / self.costs()[settings["objective"]])
            draft = self.draft(max_steps=steps, eval_every=-(-steps // REPLAYS), **settings)
            limit = initial.MAX_HIDDEN_SIZE
            initial.MAX_HIDDEN_SIZE = 0 if UNSOLVED in name else limit
            trainer = self.trainer(self.to / name, draft)
            initial.MAX_HIDDEN_SIZE = limit
            begun = time.process_time()
            trainer.run(lambda progress: None, lambda: False)
            rows: list[dict[str, Any]] = [json.loads(line) for _, line in read_json_lines(self.to / name / METRICS)]
            best = max((row for row in rows if row["kind"] == "heldout"), key=lambda row: float(row["accept_length"]))
            kept = {key: best[key] for key in ("accept_length", "verifications", "accepted", "step_accuracy")}
            write_json(path, {**kept, "steps": steps, "cpu_s": round(time.process_time() - begun, 1)})
        result: dict[str, Any] = read_json(path)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder with merged order and hidden states")
    parser.add_argument("--to", type=Path, required=True, help="folder of the trainings and their results")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the default")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    run = RunFolder(options.run)
    bench = Bench(run, parse_config(read_json(run.run_json)["config"], where=str(run.run_json)), options.to)
    print("| variant | steps | accept length | verifications | step accuracy |")
    print("|---|---|---|---|---|")
    for name in options.only:
        found = bench.train(name, options.steps)
        accuracy = " / ".join(f"{value:.3f}" for value in found["step_accuracy"])
        row = f"| {name} | {found['steps']} | {found['accept_length']:.3f} | {found['verifications']:,} | {accuracy} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
