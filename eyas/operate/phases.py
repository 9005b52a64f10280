"""The six phases: their names, order and folders. Everything that speaks of a phase imports it from here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from eyas.workspace import RunFolder

Phase = Literal["prepare", "generate", "merge", "extract", "train", "bench"]
PHASES: tuple[Phase, ...] = get_args(Phase)

TITLES: dict[Phase, str] = {
    "prepare": "Prepare prompts",
    "generate": "Generate responses",
    "merge": "Merge and shuffle",
    "extract": "Extract hidden states",
    "train": "Train the draft",
    "bench": "Deploy and benchmark",
}

_STAGES: dict[str, Phase] = {"benchmark": "bench", "export": "train", "draft": "train", "hidden": "extract", "prompts": "prepare"}


def phase_folders(run: RunFolder, phase: Phase, datasets: list[str]) -> list[Path]:
    """The folders whose manifests account for `phase`; the first two phases have one per dataset."""
    if phase == "prepare":
        return [run.prompts(name) for name in datasets]
    if phase == "generate":
        return [run.responses(name) for name in datasets]
    if phase == "train":
        return [run.draft, run.export]
    return [{"merge": run.merged, "extract": run.hidden, "bench": run.benchmark}[phase]]


def phase_of_stage(stage: str) -> Phase | None:
    """The phase that a stage's progress belongs to, None for work outside the six."""
    return next((phase for phase in PHASES if phase == stage), _STAGES.get(stage))
