"""The draft beside held-out replies, and what is said of each cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from eyas.config import RunConfig
from eyas.draft.baseline import make_draft, replay_records
from eyas.draft.corpus import Corpus
from eyas.draft.foreign import ForeignDraft
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.draft.replay import ReplayResult
from eyas.errors import ArtifactError
from eyas.speculate.sample import HitCounts, take_sample
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetHead
from eyas.workspace import RunFolder

RECORDS = 24
"""Held-out replies that every variant of the draft is run on."""
MIN_GAIN = 0.02
"""Share of columns that a change must win to be called a cause, beside three standard errors."""
MIN_COLUMNS = 100
UPSTREAM = 1.0
"""Cost of states that are wrong themselves: whatever else is seen was measured on them."""

Verdict = Literal["cause", "fine", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that was looked at: its measurement, the bound it is held against, and what to do."""

    cause: str
    verdict: Verdict
    seen: str
    bound: str
    advice: str = ""
    cost: float = 0.0
    """About the share of drafted tokens that it loses; ranks the causes."""


class Bench:
    """The draft beside the run's held-out replies; every variant is measured on the same columns."""

    def __init__(
        self, *, run: RunFolder, config: RunConfig, target: TargetSpec, head: TargetHead, corpus: Corpus, found: ForeignDraft
    ) -> None:
        self.run, self.config, self.target, self.head, self.corpus, self.found = run, config, target, head, corpus, found
        if not corpus.heldout:
            raise ArtifactError(f"{run.merged} holds no held-out reply; a diagnosis needs some, see prompts.heldout_share")
        self.sample = take_sample(corpus, corpus.heldout[:RECORDS], head.lm_head)
        self.rows = TargetRows.of(head.lm_head, found.tensors["d2t"])
        self.draft = self.variant()
        self.base = self.sample.hits(self.draft, self.rows)

    def variant(self, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **spec: Any) -> Draft:
        """The draft with other tensors or another spec."""
        tensors = dict(self.found.tensors)
        if change is not None:
            change(tensors)
        return make_draft(replace(self.found.spec, **spec), tensors, self.head.embed_tokens)

    @cached_property
    def replayed(self) -> ReplayResult:
        """The replay of the draft on four times as many held-out replies."""
        ids = self.corpus.heldout[: 4 * RECORDS]
        return replay_records(self.draft, self.found.tensors["d2t"], self.head, self.corpus, ids, self.config)

    def compare(
        self, cause: str, variants: Iterator[tuple[str, HitCounts]], advice: str, *, base: HitCounts | None = None
    ) -> Finding:
        """A cause if one of `variants` clearly hits more often than the draft as it stands, `base` on the same columns."""
        base = base or self.base
        name, best = max(variants, key=lambda item: item[1].rate)
        gain = best.rate - base.rate
        bound = max(MIN_GAIN, 3 * (base.error**2 + best.error**2) ** 0.5)
        seen = f"hits {base.rate:.1%} as it stands, {best.rate:.1%} with {name}"
        is_cause = gain > bound
        return Finding(
            cause=cause,
            verdict="cause" if is_cause else "fine",
            seen=seen,
            bound=f"no change that wins more than {bound:.1%}",
            advice=f"{advice} ({name})",
            cost=gain if is_cause else 0.0,
        )
