"""The six phases: their names, order and folders. Everything that speaks of a phase imports it from here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from eyas.errors import ConfigError
from eyas.manifest import MANIFEST_NAME
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

READS: dict[Phase, tuple[Phase, ...]] = {
    "prepare": (),
    "generate": ("prepare",),
    "merge": ("generate",),
    "extract": ("generate",),
    "train": ("merge", "extract"),
    "bench": ("prepare", "train"),
}
"""The phases whose output each phase reads."""

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


def require_earlier(run: RunFolder, phase: Phase, datasets: list[str], *, running: Sequence[Phase] = ()) -> None:
    """Raise `ConfigError` naming the phase to run first where `phase` would find nothing to read.

    Phases of `running` are made by the same command. What is there but damaged is the phase's own to refuse.
    """
    for earlier in READS[phase]:
        if earlier not in running:
            require_finished(run, earlier, phase_folders(run, earlier, datasets), for_what=f"phase {phase}")


def require_finished(run: RunFolder, phase: Phase, folders: list[Path], *, for_what: str) -> None:
    """Raise `ConfigError` unless each of `folders`, which `phase` makes, has its manifest."""
    missing = [folder / MANIFEST_NAME for folder in folders if not (folder / MANIFEST_NAME).is_file()]
    if missing:
        more = f" (nor do {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"{for_what} reads what phase {phase} makes, and {missing[0]} does not exist{more}; "
            f"run `eyas {phase} --run {run.root}` first"
        )


def phase_of_stage(stage: str) -> Phase | None:
    """The phase that a stage's progress belongs to, None for work outside the six."""
    return next((phase for phase in PHASES if phase == stage), _STAGES.get(stage))
