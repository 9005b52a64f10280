"""What each objective, step weight, unroll length and start of the draft gives at equal CPU time, on the states of a finished run.

    python -m benchmarks.objectives --run RUN --to DIR [--steps 250] [--seeds 0 1 2] [--only NAME …]

Every variant is the run's own training but for the settings of its name, with a whole schedule of its own, on one thread.
What a step costs with each is measured first, in turns on the same records, and each variant gets the steps that cost as
much as `--steps` of the default. Intervals are of 95 % over seeds (start and order), from the variance within variants:
all are replayed on the same held-out replies. A training is kept in DIR when it is done, and one that was interrupted
continues; RUN is only read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

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

DEFAULT = "default"
COPIED, RANDOM = "start-copied", "start-random"
"""The target's norm and head rows alone, as for targets too wide to solve for; and nothing but its embeddings."""
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT: {"objective": "soft_ce", "step_decay": 0.8, "num_unroll_steps": 3},
    "overlap": {"objective": "overlap"},
    "step-weight-1": {"step_decay": 1.0},
    "unroll-1": {"num_unroll_steps": 1},
    "unroll-2": {"num_unroll_steps": 2},
    "unroll-4": {"num_unroll_steps": 4},
    COPIED: {},
    RANDOM: {},
}
TIMED_STEPS = 12
REPLAYS = 3
T_975 = {1: 12.71, 2: 4.30, 4: 2.78, 6: 2.45, 8: 2.31, 10: 2.23, 12: 2.18, 14: 2.14, 16: 2.12, 24: 2.06, 32: 2.04}
"""Student's t at 97.5 % by degrees of freedom."""


class Bench:
    """The states of one run, and the trainings made of them in `to`."""

    def __init__(self, run: RunFolder, config: RunConfig, to: Path) -> None:
        self.run, self.config, self.to = run, config, to
        self.target, self.corpus = load_target(config.target), Corpus.open(run)

    def trainer(self, folder: Path, draft: DraftConfig, start: dict[str, torch.Tensor] | None = None) -> Trainer:
        return Trainer(
            folder=folder,
            corpus=self.corpus,
            target=self.target,
            spec=training_spec(self.run, self.config, self.target, len(self.corpus.d2t)),
            config=draft,
            num_draft_tokens=self.config.benchmark.num_draft_tokens,
            fingerprint=digest_json([folder.name, draft.model_dump(mode="json"), self.corpus.train]),
            start=start,
        )

    def draft(self, name: str, **changes: Any) -> DraftConfig:
        alone = {"threads": 1, "processes": 1, "hosts": 1, "zero_stage": 0, "patience": 0, "keep_checkpoints": 1}
        return self.config.draft.model_copy(update=alone | VARIANTS[DEFAULT] | VARIANTS[name] | changes)

    def costs(self) -> dict[str, float]:
        """CPU time of a step by variant, by the default's: medians of ratios of steps that take turns on the same records."""
        path = self.to / "costs.json"
        if not path.is_file():
            with tempfile.TemporaryDirectory() as folder:
                trainers = {name: self.trainer(Path(folder) / name, self.draft(name, max_steps=1000)) for name in VARIANTS}
                found: dict[str, list[float]] = {name: [] for name in VARIANTS}
                for _ in range(TIMED_STEPS):
                    for name, trainer in trainers.items():
                        with closing(trainer._groups()) as groups:
                            group = next(groups)
                        trainer.state.step = HIT_EVERY + 1  # most steps count no hits
                        begun = time.thread_time()
                        trainer._step(group, Window())
                        found[name].append(time.thread_time() - begun)
            ratios = {name: [a / b for a, b in zip(seconds, found[DEFAULT], strict=True)] for name, seconds in found.items()}
            write_json(path, {name: round(statistics.median(values), 4) for name, values in ratios.items()})
        costs: dict[str, float] = read_json(path)
        return costs

    def train(self, name: str, steps: int, seed: int) -> dict[str, Any]:
        """The result of one variant, trained where it is not kept yet."""
        path = self.to / f"{name}-seed-{seed}.json"
        if not path.is_file():
            steps = round(steps / self.costs()[name])
            draft = self.draft(name, seed=seed, max_steps=steps, eval_every=-(-steps // REPLAYS))
            folder = self.to / path.stem
            with unsolved(name):
                trainer = self.trainer(folder, draft, self.random_start(seed) if name == RANDOM else None)
            begun = time.process_time()
            trainer.run(lambda progress: None, lambda: False)
            rows: list[dict[str, Any]] = [json.loads(line) for _, line in read_json_lines(folder / METRICS)]
            best = max((row for row in rows if row["kind"] == "heldout"), key=lambda row: float(row["accept_length"]))
            kept = {key: best[key] for key in ("accept_length", "verifications", "accepted", "step_accuracy")}
            write_json(path, {**kept, "steps": steps, "cpu_s": round(time.process_time() - begun, 1)})
        result: dict[str, Any] = read_json(path)
        return result

    def random_start(self, seed: int) -> dict[str, torch.Tensor]:
        """Unit norms and random matrices that keep the size of what goes through them."""
        shapes = training_spec(self.run, self.config, self.target, len(self.corpus.d2t)).tensor_shapes
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
            for name, shape in shapes.items()
        }


@contextmanager
def unsolved(name: str) -> Iterator[None]:
    """Inside, `COPIED` starts as a target does that is too wide to solve for."""
    limit = initial.MAX_HIDDEN_SIZE
    initial.MAX_HIDDEN_SIZE = 0 if name == COPIED else limit
    try:
        yield
    finally:
        initial.MAX_HIDDEN_SIZE = limit


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row for each variant: means over seeds, and the difference to the default with its interval of 95 %."""
    lengths = {name: [float(row["accept_length"]) for row in rows] for name, rows in results.items()}
    count = min(len(values) for values in lengths.values())
    freedom = len(lengths) * (count - 1)
    lines = ["| variant | steps | CPU s | accept length | against the default | step accuracy |", "|---|---|---|---|---|---|"]
    pooled = statistics.mean(statistics.variance(values) for values in lengths.values()) if count > 1 else float("nan")
    half = T_975[max((key for key in T_975 if key <= freedom), default=1)] * (2 * pooled / count) ** 0.5
    for name, rows in results.items():
        accuracy = " / ".join(
            f"{statistics.mean(values):.3f}" for values in zip(*(row["step_accuracy"] for row in rows), strict=True)
        )
        mean = statistics.mean(lengths[name])
        gain = "" if name == DEFAULT else f"{mean - statistics.mean(lengths[DEFAULT]):+.3f} ± {half:.3f}"
        seconds = statistics.mean(row["cpu_s"] for row in rows)
        lines.append(f"| {name} | {rows[0]['steps']} | {seconds:.0f} | {mean:.3f} | {gain} | {accuracy} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder with merged order and hidden states")
    parser.add_argument("--to", type=Path, required=True, help="folder of the trainings and their results")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of the default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of start and order")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to train")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    run = RunFolder(options.run)
    bench = Bench(run, parse_config(read_json(run.run_json)["config"], where=str(run.run_json)), options.to)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for seed in options.seeds:
        for name in options.only:
            results[name].append(bench.train(name, options.steps, seed))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
