"""Predicted accept length: a replay of the served chain on greedy held-out replies.

hit[t, i] says that the draft's argmax at column t, step i is the target's full-vocabulary argmax. The walk
starts at the column before the first generated token, accepts the run of hits (at most K, none past the last
token), jumps 1 + run and counts one verification. That is the served chain but for ties. Products of
marginal accuracies are not: they ignore which columns the chain visits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from eyas.draft.data import Batch
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft, rms_norm

HIT_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class ReplayCounts:
    """Raw counts of a replay; `step_hits[i]` of `step_rows[i]` columns hit at step i (marginal, teacher-forced)."""

    verifications: int = 0
    accepted: int = 0
    step_hits: tuple[int, ...] = ()
    step_rows: tuple[int, ...] = ()

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(
            verifications=self.verifications + other.verifications,
            accepted=self.accepted + other.accepted,
            step_hits=_add(self.step_hits, other.step_hits),
            step_rows=_add(self.step_rows, other.step_rows),
        )

    @property
    def accept_length(self) -> float:
        """1 + accepted / verifications; 1.0 where nothing was verified."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def step_accuracy(self) -> list[float]:
        """Share of hits per step."""
        return [hit / rows if rows else 0.0 for hit, rows in zip(self.step_hits, self.step_rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A replay per dataset and pooled overall."""

    overall: ReplayCounts
    per_dataset: dict[str, ReplayCounts]


def replay(draft: Draft, batches: Iterable[tuple[Batch, torch.Tensor]], rows: TargetRows) -> ReplayResult:
    """Replay `draft` on packed batches made for K steps, each with the full-vocabulary argmax [M] of its label rows."""
    per_dataset: dict[str, ReplayCounts] = defaultdict(ReplayCounts)
    for batch, argmax in batches:
        if not len(batch.active):
            continue
        hits = draft_hits(draft, batch, argmax, rows)
        for dataset, segment in zip(batch.datasets, batch.segments, strict=True):
            part = slice(segment.query_start, segment.query_end)
            per_dataset[dataset] += walk(hits[:, part], batch.supervised[:, part])
    return ReplayResult(overall=sum(per_dataset.values(), ReplayCounts()), per_dataset=dict(per_dataset))


@torch.no_grad()
def draft_hits(draft: Draft, batch: Batch, argmax: torch.Tensor, rows: TargetRows) -> torch.Tensor:
    """hit [K, M]: the draft's argmax is the target's; never where that lies outside the draft vocabulary."""
    num_steps = len(batch.supervised)
    states = draft.unroll(batch, num_steps)
    wanted = rows.to_draft[argmax]  # [M] at label rows, −1 outside
    hits = torch.zeros_like(batch.supervised)
    for step, state in enumerate(states):
        normed = rms_norm(state, draft.norm.weight, draft.spec.rms_norm_eps)
        guess = torch.cat([F.linear(part, draft.lm_head.weight).argmax(-1) for part in torch.split(normed, HIT_ROWS)])
        count = max(len(guess) - step, 0)
        hits[step, :count] = guess[:count] == wanted[step:]
    return hits & batch.supervised


def walk(hits: torch.Tensor, supervised: torch.Tensor) -> ReplayCounts:
    """Counts of the chain over one record's active columns: hits and supervised [K, M] bool."""
    num_columns = hits.shape[1]
    runs = hits.long().cumprod(0).sum(0).tolist()  # run of hits from each column
    is_column = supervised[0].tolist()
    verifications = accepted = column = 0
    while column < num_columns:
        if not is_column[column]:  # between two turns: the next turn's first column starts a new chain
            column += 1
            continue
        verifications += 1
        accepted += runs[column]
        column += 1 + runs[column]
    return ReplayCounts(
        verifications=verifications,
        accepted=accepted,
        step_hits=tuple(hits.sum(1).tolist()),
        step_rows=tuple(supervised.sum(1).tolist()),
    )


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if not left or not right:
        return left or right
    return tuple(a + b for a, b in zip(left, right, strict=True))
