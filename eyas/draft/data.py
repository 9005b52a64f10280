"""Packed, padding-free batches: records end to end, supervised columns named once.

**Alignment** (its one home). At column t, unroll step i: input token x[t+1+i], state of step i−1 at t
(step 0: the aux states at t), target distribution P(x[t+2+i] | …), which is lm_head of the final state at
t+1+i. Supervised if and only if x[t+1] and x[t+2+i] are generated tokens of the same turn; ids, labels and
mask shift together. Active columns of a record are the range from its first supervised column to its
last; columns after that are no key of any query and are dropped. Row m + i of the labels belongs to active
column m at step i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.draft.attention import Segment


@dataclass(frozen=True, kw_only=True)
class Record:
    """One reply with the target's states: T tokens."""

    id: str
    dataset: str
    tokens: torch.Tensor  # [T] int
    loss_mask: torch.Tensor  # [T] bool or 0/1
    aux: torch.Tensor  # [T, 3H]
    final: torch.Tensor  # [T, H], the input of lm_head, or top-k probabilities [T, 1 + 2k]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """N key columns and M active columns of packed records, for S unroll steps."""

    ids: tuple[str, ...]
    segment_ids: tuple[str, ...]
    """Ids of the records that have a supervised column, one for each segment."""
    datasets: tuple[str, ...]
    num_positions: int
    """Tokens of the records, columns that were dropped included."""
    tokens: torch.Tensor  # [N] int64: x[t+1]
    aux: torch.Tensor  # [N, 3H]
    positions: torch.Tensor  # [N] int64: t
    active: torch.Tensor  # [M] int64 into N
    step_tokens: torch.Tensor  # [S − 1, M] int64: x[t+1+i] for i ≥ 1
    labels: torch.Tensor  # [M, H]: final state at t+1, or top-k probabilities [M, 1 + 2k]
    supervised: torch.Tensor  # [S, M] bool
    segments: tuple[Segment, ...]

    @property
    def num_supervised(self) -> int:
        """Supervised columns of step 0."""
        return int(self.supervised[0].sum())

    def pinned(self) -> Batch:
        """The same in page-locked memory, from which a copy to a GPU runs beside the computation."""
        return self._mapped(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        changed: Any = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **changed)


def supervised_columns(loss_mask: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Which (step, column) of a record teach: [S, T] bool, from its mask [T]."""
    mask = loss_mask.bool()
    length = len(mask)
    starts = mask.clone()
    starts[1:] &= ~mask[:-1]
    turn = starts.cumsum(0) * mask  # [T]: 0 outside, else the number of the turn
    result = torch.zeros(num_steps, length, dtype=torch.bool)
    for step in range(num_steps):
        count = length - 2 - step
        if count > 0:
            result[step, :count] = mask[1 : 1 + count] & (turn[1 : 1 + count] == turn[2 + step :])
    return result


def make_batch(records: Sequence[Record], num_steps: int) -> Batch:
    """Pack `records`; those without a supervised column contribute nothing. All may be empty of them."""
    pieces = [_Piece.of(record, num_steps) for record in records]
    kept = [piece for piece in pieces if piece is not None]
    segments, active, keys, queries = [], [], 0, 0
    for piece in kept:
        num_keys, num_queries = len(piece.tokens), piece.supervised.shape[1]
        segments.append(Segment(keys, keys + num_keys, queries, queries + num_queries))
        active.append(torch.arange(keys + num_keys - num_queries, keys + num_keys))
        keys, queries = keys + num_keys, queries + num_queries
    empty = torch.zeros(0, dtype=torch.int64)
    return Batch(
        ids=tuple(record.id for record in records),
        segment_ids=tuple(piece.record.id for piece in kept),
        datasets=tuple(piece.record.dataset for piece in kept),
        num_positions=sum(len(record.tokens) for record in records),
        tokens=_cat([piece.tokens for piece in kept], empty),
        aux=_cat([piece.record.aux[: len(piece.tokens)] for piece in kept], records[0].aux[:0]),
        positions=_cat([torch.arange(len(piece.tokens)) for piece in kept], empty),
        active=_cat(active, empty),
        step_tokens=_cat([piece.step_tokens.T for piece in kept], empty.expand(num_steps - 1, 0).T).T,
        labels=_cat([piece.record.final[piece.first + 1 : piece.last + 2] for piece in kept], records[0].final[:0]),
        supervised=_cat([piece.supervised.T for piece in kept], torch.zeros(0, num_steps, dtype=torch.bool)).T,
        segments=tuple(segments),
    )


def _cat(pieces: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.cat(pieces) if pieces else empty


@dataclass(frozen=True, kw_only=True)
class _Piece:
    record: Record
    first: int  # first supervised column
    last: int  # last supervised column
    tokens: torch.Tensor  # [last + 1]: x[t+1]
    step_tokens: torch.Tensor  # [S − 1, active]
    supervised: torch.Tensor  # [S, active]

    @classmethod
    def of(cls, record: Record, num_steps: int) -> _Piece | None:
        supervised = supervised_columns(record.loss_mask, num_steps)
        columns = supervised[0].nonzero()[:, 0]
        if not len(columns):
            return None
        first, last = int(columns[0]), int(columns[-1])
        tokens = record.tokens.long()
        later = torch.arange(first, last + 1) + torch.arange(2, num_steps + 1).unsqueeze(1)  # [S − 1, active]: t + 1 + i
        return cls(
            record=record,
            first=first,
            last=last,
            tokens=tokens[1 : last + 2],
            step_tokens=tokens[later.clamp(max=len(tokens) - 1)],
            supervised=supervised[:, first : last + 1],
        )
