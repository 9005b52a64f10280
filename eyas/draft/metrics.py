"""`metrics.jsonl`, and the same figures for TensorBoard and Weights & Biases where they are wanted.

Every line has `kind` ("train" or "heldout"), `step`, `epoch` and `seconds`. Lines past a resumed step are cut, so
a file never tells of steps that were not taken. The file is the record; the other two are views of it.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.draft.config import DraftConfig
from eyas.draft.data import Batch
from eyas.draft.loss import LossResult
from eyas.errors import ConfigError
from eyas.files import json_line, write_bytes

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Metrics:
    """Writes the metrics of the training in `folder`, which stands at `step`."""

    def __init__(self, folder: Path, config: DraftConfig, step: int) -> None:
        self.path = folder / METRICS
        self._cut(step)
        self.tensorboard = _tensorboard(folder / "tensorboard", step) if config.tensorboard else None
        self.wandb = _wandb(folder, config) if config.wandb_project else None

    def write(self, row: dict[str, Any]) -> None:
        """Append one line."""
        with open(self.path, "ab") as file:
            file.write(json_line(row))
        scalars = dict(_scalars({name: value for name, value in row.items() if name not in ("kind", "step")}, row["kind"]))
        if self.tensorboard is not None:
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, value, row["step"])
            self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log(scalars, step=row["step"])

    def close(self) -> None:
        """Finish the views."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _cut(self, step: int) -> None:
        """Drop lines past `step` (all of them for a fresh start), a torn last line included."""
        kept = []
        for line in self.path.read_bytes().split(b"\n") if self.path.is_file() else []:
            try:
                if line and json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                logger.warning("metrics line dropped file=%s", self.path)
        write_bytes(self.path, b"".join(kept) if step else b"")


class Window:
    """Sums over the steps between two lines of metrics, and per dataset over this process's batches."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.datasets: defaultdict[str, Any] = defaultdict(int)

    def add(self, step: dict[str, Any]) -> None:
        self.steps.append(step)

    def add_datasets(self, results: Iterable[tuple[Batch, LossResult]]) -> None:
        """Add each record's sums, [4, S] as in `LossResult.columns`, to its dataset."""
        for batch, result in results:
            for dataset, segment in zip(batch.datasets, batch.segments, strict=True):
                self.datasets[dataset] += result.columns[:, :, segment.query_start : segment.query_end].sum(-1)

    def figures(self) -> dict[str, Any]:
        """Loss, cross-entropy and accuracy per unroll step, gradient norm, rates and counts over the window."""
        kept = sum(step["kept"] for step in self.steps)
        counted = [step for step in self.steps if step["hits"] is not None]
        supervised = sum(step["supervised"] for step in self.steps)
        figures = {
            "loss": round(sum(step["loss"] for step in self.steps) / len(self.steps), 5),
            "step_loss": _ratios(sum(step["step_loss"] for step in self.steps), kept),
            "grad_norm": round(sum(step["grad_norm"] for step in self.steps) / len(self.steps), 4),
            "learning_rate": self.steps[-1]["learning_rate"],
            "supervised": int(supervised[0]),
            "dropped": int(supervised[0] - kept[0]),
            "positions_per_s": round(
                sum(step["positions"] for step in self.steps) / sum(step["seconds"] for step in self.steps), 1
            ),
        }
        if counted:
            figures["step_accuracy"] = _ratios(sum(step["hits"] for step in counted), sum(step["supervised"] for step in counted))
        return figures


def dataset_figures(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    """Cross-entropy and accuracy per unroll step of each dataset, from the sums of every process; `kept` rows at step 0."""
    sums: dict[str, Any] = defaultdict(int)
    for part in parts:
        for name, value in part.items():
            sums[name] += value.double()
    figures = {}
    for name, (loss, kept, hits, counted) in sorted(sums.items()):
        figures[name] = {"step_loss": _ratios(loss, kept), "kept": int(kept[0])}
        if int(counted[0]):
            figures[name]["step_accuracy"] = _ratios(hits, counted)
    return figures


def _ratios(sums: torch.Tensor, counts: torch.Tensor) -> list[float]:
    return [round(float(value), 5) for value in sums / counts.clamp(min=1)]


def _scalars(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """The numbers of a nested row by path; lists count from 0."""
    if isinstance(value, (int, float)):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _scalars(item, f"{name}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _scalars(item, f"{name}/{index}")


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"draft.tensorboard wants the package tensorboard ({error}); pip install 'eyas[watch]', or set it to false"
        ) from error
    return SummaryWriter(str(folder), purge_step=step + 1)


def _wandb(folder: Path, config: DraftConfig) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"draft.wandb_project wants the package wandb ({error}); pip install 'eyas[wandb]', or leave the project empty"
        ) from error
    name = folder.resolve().parent.name
    return wandb.init(
        project=config.wandb_project, name=name, id=name, resume="allow", dir=folder, config=config.model_dump(mode="json")
    )
