"""Checkpoints that are whole or absent, rotated, and never continue another run's data.

`checkpoints/step-NNNNNNNN/` holds `model.safetensors` (fp32 masters by export name), `optimizer.safetensors`
and `state.json` with the digests of both; the folder appears by one rename. `best` and `last` are text files
that name a step. A damaged checkpoint is passed over for the next older one. Training draws no random
numbers after its start but the order of each epoch, which follows from seed and epoch, so step, epoch and
batch are the whole position.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import ArtifactError
from eyas.files import digest_file, fsync_folder, read_json, storage_errors, write_bytes, write_json

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
        write_json(temporary / STATE, state.model_copy(update={"files": files}).model_dump())
        for name in (MODEL, OPTIMIZER):
            _fsync(temporary / name)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync_folder(root)
    if is_best:
        write_bytes(root / "best", final.name.encode())
    write_bytes(root / "last", final.name.encode())
    _rotate(root, keep)
    return final


def load_latest(root: Path, fingerprint: str) -> Checkpoint | None:
    """The newest whole checkpoint of this `fingerprint`; damaged ones are passed over with a warning, others ignored."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            checkpoint = load_checkpoint(folder)
        except ArtifactError as error:
            logger.warning("checkpoint passed over folder=%s error=%s", folder, error)
            continue
        if checkpoint.state.fingerprint == fingerprint:
            return checkpoint
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint; raises `ArtifactError` where a file is missing, damaged or not what `state.json` says."""
    try:
        state = TrainerState.model_validate(read_json(folder / STATE))
    except ValidationError as error:
        raise ArtifactError(f"{folder / STATE} is no trainer state ({error.errors()[0]['msg']}); remove {folder}") from error
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name in (MODEL, OPTIMIZER):
        path = folder / name
        if not path.is_file() or digest_file(path) != state.files.get(name):
            raise ArtifactError(f"{path} is missing or differs from its digest in {STATE}; remove {folder}")
        try:
            tensors[name] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{path} is not safetensors ({error}); remove {folder}") from error
    return Checkpoint(folder=folder, state=state, masters=tensors[MODEL], optimizer=tensors[OPTIMIZER])


def named_checkpoint(root: Path, name: str) -> Path:
    """The folder that `best` or `last` names; raises `ArtifactError` if there is none."""
    pointer = root / name
    if not pointer.is_file():
        raise ArtifactError(f"{pointer} does not exist; run the training phase first")
    folder = root / Path(pointer.read_text(encoding="utf-8").strip()).name
    if not folder.is_dir():
        raise ArtifactError(f"{pointer} names {folder.name}, which does not exist; run the training phase again")
    return folder


def clear_other_trainings(root: Path, fingerprint: str) -> None:
    """Remove checkpoints of other inputs or settings, and what an interrupted writing left."""
    for folder in [*root.glob("step-*"), *root.glob(".step-*.tmp")]:
        try:
            is_ours = not folder.name.startswith(".") and read_json(folder / STATE).get("fingerprint") == fingerprint
        except (ArtifactError, AttributeError):
            is_ours = False
        if not is_ours:
            logger.info("checkpoint removed folder=%s reason=other_training", folder)
            shutil.rmtree(folder, ignore_errors=True)
    for name in ("best", "last"):
        pointer = root / name
        if pointer.is_file() and not (root / pointer.read_text(encoding="utf-8").strip()).is_dir():
            pointer.unlink()


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def _rotate(root: Path, keep: int) -> None:
    best = root / "best"
    kept = {best.read_text(encoding="utf-8").strip()} if best.is_file() else set()
    folders = sorted(root.glob("step-*"))
    for folder in folders[:-keep]:
        if folder.name not in kept:
            shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
