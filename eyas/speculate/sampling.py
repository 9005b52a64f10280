"""Above temperature 0: do both sides draw from one distribution? An exact two-sample permutation test.

Statistic: over prompts, positions and tokens, the squared difference of the two sides' counts divided by their sum (the
two-sample χ²). Under the null hypothesis whole replies may change sides within their prompt, so the p-value is the
share of such shuffles with a statistic at least as large: exact for any counts and for dependent positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHUFFLES = 4000
SIGNIFICANCE = 0.001
"""A draft is refused below it: one benchmark in a thousand is refused for nothing."""

Replies = Sequence[Sequence[int]]


def same_distribution(prompts: Sequence[tuple[Replies, Replies]], *, seed: int = 0) -> dict[str, Any] | None:
    """Compare (replies without, replies with the draft) of each prompt; None where nothing was sampled."""
    if not prompts:
        return None
    random = np.random.default_rng(seed)
    seen, shuffled = 0.0, np.zeros(SHUFFLES)
    for off, on in prompts:
        features = _features([*off, *on])  # [replies, C]
        sides = np.repeat([1.0, -1.0], [len(off), len(on)])
        drawn = random.permuted(np.tile(sides, (SHUFFLES, 1)), axis=1)  # [SHUFFLES, replies]
        totals = features.sum(axis=0)
        seen += float(((sides @ features) ** 2 / totals).sum())
        shuffled += ((drawn @ features) ** 2 / totals).sum(axis=1)
    p_value = (1 + int((shuffled >= seen - 1e-9).sum())) / (1 + SHUFFLES)
    return {
        "prompts": len(prompts),
        "replies_per_side": sum(len(off) for off, _ in prompts),
        "p_value": p_value,
        "holds": p_value >= SIGNIFICANCE,
    }


def _features(replies: Replies) -> NDArray[np.float64]:
    """One column per (position, token) that occurs, one row per reply."""
    columns: dict[tuple[int, int], int] = {}
    places = [[columns.setdefault(item, len(columns)) for item in enumerate(reply)] for reply in replies]
    features = np.zeros((len(replies), len(columns)))
    for row, taken in enumerate(places):
        features[row, taken] = 1.0
    return features
