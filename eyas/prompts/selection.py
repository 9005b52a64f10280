"""Which candidates become prompts: contamination, duplicates across datasets, quota, subsample; then the split.

Only ids, hashes and signatures are held in memory (about 0.6 kB a candidate). Precedence is the order
of the datasets in the config, and inside a dataset a hash of (seed, id): a smaller quota or subsample
is a subset of a larger one, so responses made for it are never lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from eyas.prompts.candidates import FILE_NAME
from eyas.prompts.config import DatasetConfig, PromptsConfig
from eyas.prompts.conversation import hash16
from eyas.prompts.duplicates import NUM_PERMUTATIONS, find_near_duplicates

CHOICE_REASONS = ("duplicate", "near_duplicate", "contaminated", "language", "too_short", "over_quota", "not_sampled")
"""Reasons that make a row unwanted, not unusable: they stay out of the share that `reject_limit` bounds."""

_COLUMNS = ["id", "conversation", "prompt", "signature", "contamination", "where"]


@dataclass(frozen=True, kw_only=True)
class Reject:
    """A candidate that is not chosen, and why."""

    id: bytes
    where: str
    reason: str
    detail: str


@dataclass(kw_only=True)
class Choice:
    """What was chosen of one dataset."""

    kept: set[bytes] = field(default_factory=set)
    rejects: list[Reject] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    dataset: str
    id: bytes
    conversation: bytes
    prompt: bytes
    contamination: str
    where: str


def select(config: PromptsConfig, folders: dict[str, Path]) -> dict[str, Choice]:
    """Choose among the candidates of all datasets; `folders` maps each dataset's name to its candidates.

    Per candidate, the first that holds: contaminated, the id of an earlier row, an equal prompt of an
    earlier row, a near-duplicate of an earlier row, over the quota, not sampled.
    """
    choices = {dataset.name: Choice() for dataset in config.datasets}
    rows, signatures = _load(config, folders)
    by_prompt: dict[bytes, _Row] = {}
    unique: list[int] = []
    for index, row in enumerate(rows):
        earlier = by_prompt.get(row.prompt)
        if row.contamination:
            _reject(choices, row, "contaminated", row.contamination)
        elif earlier is not None:
            _reject(choices, row, "duplicate", f"equals {earlier.id.hex()} ({earlier.dataset} {earlier.where})")
        else:
            by_prompt[row.prompt] = row
            unique.append(index)
    near: dict[int, str] = {}
    if config.near_duplicates and unique:
        groups = [rows[index].conversation for index in unique]
        for found in find_near_duplicates(signatures[unique], groups, config.near_duplicate_threshold):
            other = rows[unique[found.of]]
            near[unique[found.row]] = f"like {other.id.hex()} ({other.dataset} {other.where}), similarity {found.similarity:.2f}"
    for index, detail in near.items():
        _reject(choices, rows[index], "near_duplicate", detail)
    remaining: dict[str, list[_Row]] = {dataset.name: [] for dataset in config.datasets}
    for index in unique:
        if index not in near:
            remaining[rows[index].dataset].append(rows[index])
    for dataset in config.datasets:
        _apply_quota(dataset, config, remaining[dataset.name], choices)
    return choices


def _load(config: PromptsConfig, folders: dict[str, Path]) -> tuple[list[_Row], np.ndarray]:
    """All candidates in order of precedence, and their signatures [n, NUM_PERMUTATIONS]."""
    seed = str(config.seed)
    rows: list[_Row] = []
    parts: list[np.ndarray] = [np.empty((0, NUM_PERMUTATIONS), dtype="<u2")]
    for dataset in config.datasets:
        found: list[_Row] = []
        chunks: list[np.ndarray] = []
        for batch in read_candidates(folders[dataset.name]):
            columns = [batch.column(name).to_pylist() for name in _COLUMNS if name != "signature"]
            found += [_Row(dataset.name, *values) for values in zip(*columns, strict=True)]
            column = batch.column("signature")
            data = np.frombuffer(column.buffers()[1], dtype="<u2").reshape(-1, NUM_PERMUTATIONS)
            chunks.append(data[column.offset : column.offset + len(column)].copy())
        order = sorted(range(len(found)), key=lambda index: hash16(seed, found[index].id))
        rows += [found[index] for index in order]
        if chunks:
            parts.append(np.concatenate(chunks)[order])
    return rows, np.concatenate(parts)


def read_candidates(folder: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a dataset's candidates, in the order of its source."""
    with pa.OSFile(str(folder / FILE_NAME)) as file, pa.ipc.open_stream(file) as reader:
        yield from reader


def _reject(choices: dict[str, Choice], row: _Row, reason: str, detail: str) -> None:
    choices[row.dataset].rejects.append(Reject(id=row.id, where=row.where, reason=reason, detail=detail))


def _apply_quota(dataset: DatasetConfig, config: PromptsConfig, rows: list[_Row], choices: dict[str, Choice]) -> None:
    num_wanted = min(dataset.quota or len(rows), len(rows))
    num_sampled = round(num_wanted * config.subsample)
    choices[dataset.name].kept = {row.id for row in rows[:num_sampled]}
    for row in rows[num_sampled:num_wanted]:
        _reject(choices, row, "not_sampled", f"prompts.subsample is {config.subsample:g}")
    for row in rows[num_wanted:]:
        _reject(choices, row, "over_quota", f"the quota is {dataset.quota}")
