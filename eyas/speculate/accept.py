"""Accept length: the one definition, from raw counts, with an interval.

Accept length = tokens per *verification*, bonus included = 1 + Σ accepted / Σ verifications, pooled
over requests. The token of the prefill belongs to no verification, and drafts past the end of the reply do
not count. SGLang's own `spec_accept_length` counts the prefill's token (8/7 with nothing accepted), so
it is never used; raw counts are stored beside every figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from eyas.errors import ServerError

DEFINITION = "accept length = 1 + accepted drafts / verifications, pooled over requests"
BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class AcceptCounts:
    """Raw counts of one request or of a pool of requests; adding two pools them."""

    verifications: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()
    """Verifications that accepted exactly 0, 1, 2, … drafts; empty where a server does not say."""

    def __add__(self, other: AcceptCounts) -> AcceptCounts:
        histogram = tuple(map(sum, zip_longest(self.histogram, other.histogram, fillvalue=0)))
        return AcceptCounts(
            verifications=self.verifications + other.verifications, accepted=self.accepted + other.accepted, histogram=histogram
        )

    @property
    def accept_length(self) -> float:
        """1 + accepted / verifications; 1.0 where nothing was verified."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def position_rates(self) -> list[float]:
        """Share of verifications that accept draft i + 1 among those that accepted the i drafts before it."""
        at_least = [sum(self.histogram[number:]) for number in range(len(self.histogram))]
        return [reached / before for before, reached in pairwise(at_least) if before]


def pool(counts: Iterable[AcceptCounts]) -> AcceptCounts:
    """The counts of all requests together."""
    return sum(counts, AcceptCounts())


def counts_from_sglang(meta_info: Mapping[str, Any]) -> AcceptCounts:
    """Counts of one reply of SGLang or of the embedded engine, by `spec_verify_ct` and `spec_num_correct_drafts`.

    SGLang counts all that a reply's last verification accepts, also past the stop token or the cap (0.5.23,
    batch_result_processor.py); only what is part of the reply counts here. The histogram stays as the server gives it.
    Raises `ServerError` where they are absent: then the server runs without a draft.
    """
    try:
        verifications, accepted = int(meta_info["spec_verify_ct"]), int(meta_info["spec_num_correct_drafts"])
        return AcceptCounts(
            verifications=verifications,
            accepted=min(accepted, int(meta_info["completion_tokens"]) - verifications),
            histogram=tuple(meta_info.get("spec_correct_drafts_histogram") or ()),
        )
    except KeyError as error:
        raise ServerError(
            f"reply {meta_info.get('id', '?')} has no {error.args[0]} in meta_info, so its server speculates not at all; "
            "start it with --speculative-algorithm EAGLE3 and the draft's folder"
        ) from error


def counts_from_vllm(metrics: Mapping[str, float]) -> AcceptCounts:
    """Counts since the start of a vLLM engine: `vllm:spec_decode_num_drafts` and `…_num_accepted_tokens`."""
    return AcceptCounts(
        verifications=int(metrics["vllm:spec_decode_num_drafts"]), accepted=int(metrics["vllm:spec_decode_num_accepted_tokens"])
    )


def walk(reply: Sequence[int], num_draft_tokens: int, propose: Callable[[int], Sequence[int]]) -> AcceptCounts:
    """Counts of the served chain on a greedy reply, for any drafter, by exact simulation.

    `propose(position)` gives the drafts (K at most are used) for `reply[position:]`, knowing `reply[:position]`.
    The prefill gives `reply[0]`; each verification accepts the run of hits and adds one token of the target's.
    """
    counts = AcceptCounts()
    position = 1
    while position < len(reply):
        run = 0
        for drafted, token in zip(propose(position)[:num_draft_tokens], reply[position:], strict=False):
            if drafted != token:
                break
            run += 1
        counts += AcceptCounts(verifications=1, accepted=run, histogram=(*[0] * run, 1))
        position += run + 1
    return counts


MIN_REQUESTS = 5
"""Requests that an interval needs at least."""


def interval(counts: Sequence[AcceptCounts], share: float = 0.95, *, seed: int = 0) -> list[float] | None:
    """Bootstrap interval of the pooled accept length over requests (percentiles of 2,000 resamples): [low, high].

    None for fewer than five requests: resamples of so few are the same few values again, and their spread means nothing.
    """
    if len(counts) < MIN_REQUESTS:
        return None
    verifications = np.array([item.verifications for item in counts], dtype=np.float64)  # [requests]
    accepted = np.array([item.accepted for item in counts], dtype=np.float64)
    if not verifications.sum():
        return [1.0, 1.0]
    drawn = np.random.default_rng(seed).integers(0, len(counts), size=(BOOTSTRAP_SAMPLES, len(counts)))
    lengths = 1.0 + accepted[drawn].sum(axis=1) / np.maximum(verifications[drawn].sum(axis=1), 1.0)  # [samples]
    low, high = np.quantile(lengths, [(1 - share) / 2, (1 + share) / 2])
    return [float(low), float(high)]
