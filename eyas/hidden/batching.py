"""Batches of near-equal lengths: right padding then costs a few per cent and needs no mask under causal attention."""

from __future__ import annotations

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `batch_tokens` padded tokens (or one sequence), longest first."""
    batches: list[list[int]] = []
    widest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or widest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            widest = lengths[index]
        batches[-1].append(index)
    return batches
