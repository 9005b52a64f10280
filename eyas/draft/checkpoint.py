"""Checkpoints that are whole or absent, rotated, and never continue another run's data.

`checkpoints/step-NNNNNNNN/` holds `model.safetensors` (fp32 masters by export name), `optimizer.safetensors`
and `state.json` with the digests of both; the folder appears by one rename. `best` and `last` are text files
that name a step; what names none of ours is as absent. A damaged checkpoint, or one whose best is damaged, is passed
over for the next older one, and training makes it again. Training draws no random
numbers after its start but the order of each epoch, which follows from seed and epoch, so step, epoch and
batch are the whole position.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import ArtifactError
from eyas.files import digest_file, fsync_folder, read_sealed, storage_errors, write_bytes, write_sealed

logger = logging.getLogger(__name__)

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


class TrainerState(BaseModel):
    """Where a training stands after `step` optimizer steps."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    step: int = 0
    epoch: int = 0
    batch: int = Field(default=0, description="Batches of this epoch that are done.")
    dtype: str
    rate_scales: dict[str, float] = Field(default_factory=dict, description="Factors of the learning rate by parameter.")
    positions: int = 0
    seconds: float = 0.0
    skipped: dict[str, int] = Field(default_factory=dict, description="Batches that taught nothing, by reason.")
    best_step: int = -1
    best_accept_length: float = 0.0
    stale_replays: int = Field(default=0, description="Replays since the best one.")
    files: dict[str, str] = Field(default_factory=dict, description="SHA-256 of the tensors' files.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    folder: Path
    state: TrainerState
    masters: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def save_checkpoint(
    root: Path,
    state: TrainerState,
    masters: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    *,
    is_best: bool,
    keep: int,
) -> Path:
    """Write a checkpoint under `root`, point `last` (and `best`) at it, remove old ones but the best."""
    final = root / step_name(state.step)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    with storage_errors(final):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: value.detach().contiguous() for name, value in masters.items()}, temporary / MODEL)
        save_file({name: value.detach().contiguous() for name, value in optimizer.items()}, temporary / OPTIMIZER)
        files = {name: digest_file(temporary / name) for name in (MODEL, OPTIMIZER)}
        write_sealed(temporary / STATE, state.model_copy(update={"files": files}).model_dump())
        for name in (MODEL, OPTIMIZER):
            _fsync(temporary / name)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync_folder(root)
    if is_best:
        write_bytes(root / "best", final.name.encode())
    write_bytes(root / "last", final.name.encode())
    _rotate(root, keep, final.name)
    return final


def load_latest(root: Path, fingerprint: str) -> Checkpoint | None:
    """The newest checkpoint of this `fingerprint` that is whole, and its best too; damaged ones are passed over with a warning."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            checkpoint = load_checkpoint(folder)
            if checkpoint.state.best_step >= 0:
                _whole_state(root / step_name(checkpoint.state.best_step))
        except ArtifactError as error:
            logger.warning("checkpoint passed over folder=%s error=%s", folder, error)
            continue
        if checkpoint.state.fingerprint == fingerprint:
            return checkpoint
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint; raises `ArtifactError` where a file is missing, damaged or not what `state.json` says."""
    state = _whole_state(folder)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name in (MODEL, OPTIMIZER):
        path = folder / name
        try:
            tensors[name] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path} is not safetensors ({error}); remove {folder}") from error
    return Checkpoint(folder=folder, state=state, masters=tensors[MODEL], optimizer=tensors[OPTIMIZER])


def named_checkpoint(root: Path, name: str) -> Path:
    """The folder that `best` or `last` names; raises `ArtifactError` if there is none."""
    step = _pointed(root / name)
    if step is None:
        raise ArtifactError(f"{root / name} names no step that lies beside it; run the training phase (again)")
    return root / step


def point_at_best(root: Path, state: TrainerState) -> None:
    """Let `best` name what `state` knows as the best, whatever stands there."""
    if state.best_step >= 0:
        write_bytes(root / "best", step_name(state.best_step).encode())
    else:
        (root / "best").unlink(missing_ok=True)


def clear_other_trainings(root: Path, fingerprint: str) -> None:
    """Remove checkpoints of other inputs or settings, and what an interrupted writing left."""
    for folder in [*root.glob("step-*"), *root.glob(".step-*.tmp")]:
        try:
            is_ours = not folder.name.startswith(".") and read_sealed(folder / STATE).get("fingerprint") == fingerprint
        except (ArtifactError, AttributeError):
            is_ours = False
        if not is_ours:
            logger.info("checkpoint removed folder=%s reason=other_training", folder)
            shutil.rmtree(folder, ignore_errors=True)
    for name in ("best", "last"):
        if _pointed(root / name) is None:
            (root / name).unlink(missing_ok=True)


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def _whole_state(folder: Path) -> TrainerState:
    """The state of a checkpoint whose files are what it says; raises `ArtifactError` where one is not."""
    try:
        state = TrainerState.model_validate(read_sealed(folder / STATE))
    except ValidationError as error:
        raise ArtifactError(f"{folder / STATE} is no trainer state ({error.errors()[0]['msg']}); remove {folder}") from error
    for name in (MODEL, OPTIMIZER):
        path = folder / name
        if not path.is_file() or digest_file(path) != state.files.get(name):
            raise ArtifactError(f"{path} is missing or differs from its digest in {STATE}; remove {folder}")
    return state


def _pointed(pointer: Path) -> str | None:
    """The step that `best` or `last` names, if it names one that lies beside it."""
    name = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    return name if re.fullmatch(r"step-\d{8,}", name) and (pointer.parent / name).is_dir() else None


def _rotate(root: Path, keep: int, newest: str) -> None:
    """Remove the oldest; steps after `newest` stay: those that were passed over are made again as training reaches them."""
    folders = sorted(folder for folder in root.glob("step-*") if folder.name <= newest)
    for folder in folders[:-keep]:
        if folder.name != _pointed(root / "best"):
            shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
