"""Accept length by the length of the context: a draft may fall off beyond the longest record that it was trained on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from eyas.speculate.accept import AcceptCounts, interval, pool
from eyas.speculate.results import Row

EDGES = (0.25, 0.5, 1.0, 2.0)
"""Of the training length; the last band has no end."""


def by_context(rows: Sequence[Row], trained_tokens: int) -> list[dict[str, Any]]:
    """Bands of `rows` by tokens of prompt and compared reply, empty ones left out; `trained_tokens` ends the third band."""
    edges = [0, *(int(trained_tokens * edge) for edge in EDGES), None]
    bands = []
    for low, high in itertools.pairwise(edges):
        mine = [row for row in rows if (low or 0) < _tokens(row) and (high is None or _tokens(row) <= high)]
        if not mine:
            continue
        counts = [row.counts for row in mine]
        total = pool(counts)
        predicted = [AcceptCounts(verifications=pair[0], accepted=pair[1]) for row in mine if (pair := row.predicted)]
        bands.append(
            {
                "above": low,
                "up_to": high,
                "is_longer_than_training": low is not None and low >= trained_tokens,
                "num_requests": len(mine),
                "accept_length": total.accept_length,
                "interval_95": interval(counts),
                "num_verifications": total.verifications,
                "predicted_accept_length": pool(predicted).accept_length if predicted else None,
            }
        )
    return bands


def _tokens(row: Row) -> int:
    return len(row.prompt_ids) + row.loop_free_tokens
