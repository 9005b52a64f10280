"""Above temperature 0: do both sides draw from one distribution? An exact two-sample permutation test.

Statistic: over prompts, positions and tokens, the squared difference of the two sides' counts divided by their sum (the
two-sample χ²). Under the null hypothesis whole replies may change sides within their prompt, so the p-value is the
share of such shuffles with a statistic at least as large: exact for any counts and for dependent positions.

A test that finds nothing says only what it could have found. So its power is simulated on the replies themselves: both
sides are drawn anew from the pool, one of them with a fault, the likeliest token put in place of the draw at a share of
the positions (what a verifier does that keeps drafts too readily); reported is the smallest share that is found often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHUFFLES = 4000
SIGNIFICANCE = 0.001
"""A draft is refused below it: one benchmark in a thousand is refused for nothing."""
POWER = 0.8
"""Share of simulated faults that must be found for the test to be said to find them."""
FAULT_SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
SIMULATIONS = 200

Replies = Sequence[Sequence[int]]


def same_distribution(prompts: Sequence[tuple[Replies, Replies]], *, seed: int = 0) -> dict[str, Any] | None:
    """Compare (replies without, replies with the draft) of each prompt; None where nothing was sampled."""
    if not prompts:
        return None
    random = np.random.default_rng(seed)
    seen, shuffled = 0.0, np.zeros(SHUFFLES)
    for off, on in prompts:
        features = _features(_columns([*off, *on]))  # [replies, C]
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
        "power": POWER,
        "found_share": _found_share(prompts, float(np.quantile(shuffled, 1 - SIGNIFICANCE)), random),
    }


def _found_share(prompts: Sequence[tuple[Replies, Replies]], critical: float, random: np.random.Generator) -> float | None:
    """The smallest of `FAULT_SHARES` whose fault exceeds `critical` in `POWER` of the simulations; None if none does."""
    pools = [(_columns([*off, *on]), len(off), len(on)) for off, on in prompts]

    def is_found(share: float) -> bool:
        statistics = sum(_simulated(*pool, share, random) for pool in pools)
        return bool((statistics > critical).mean() >= POWER)

    place = bisect_left(FAULT_SHARES, True, key=is_found)
    return FAULT_SHARES[place] if place < len(FAULT_SHARES) else None


def _simulated(columns: NDArray[np.int64], num_off: int, num_on: int, share: float, random: np.random.Generator) -> Any:
    """Statistics [SIMULATIONS] of sides drawn from the pool, the one "on" with the fault at `share` of its positions."""
    size = int(columns.max()) + 1
    counts = np.bincount(columns[columns >= 0], minlength=size)
    likeliest = np.take_along_axis(columns, np.where(columns >= 0, counts[columns], -1).argmax(axis=0)[None], axis=0)  # [1, P]
    off = columns[random.integers(0, len(columns), (SIMULATIONS, num_off))]  # [SIMULATIONS, replies, P]
    on = columns[random.integers(0, len(columns), (SIMULATIONS, num_on))]
    on = np.where((random.random(on.shape) < share) & (on >= 0), likeliest, on)
    a, b = (_counts(side, size) for side in (off, on))
    return ((a - b) ** 2 / np.maximum(a + b, 1)).sum(axis=1)


def _counts(sides: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """How often each column occurs in each of `sides` [S, replies, P]: [S, size]."""
    shifted = sides + size * np.arange(len(sides))[:, None, None]
    return np.bincount(shifted[sides >= 0], minlength=size * len(sides)).reshape(len(sides), size)


def _columns(replies: Replies) -> NDArray[np.int64]:
    """[replies, positions]: one number per (position, token) that occurs, -1 past the end of a reply."""
    numbers: dict[tuple[int, int], int] = {}
    columns = np.full((len(replies), max(map(len, replies))), -1)
    for row, reply in enumerate(replies):
        columns[row, : len(reply)] = [numbers.setdefault(item, len(numbers)) for item in enumerate(reply)]
    return columns


def _features(columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """One-hot [replies, C] of `_columns`."""
    features = np.zeros((len(columns), int(columns.max()) + 1))
    rows, places = np.nonzero(columns >= 0)
    features[rows, columns[rows, places]] = 1.0
    return features
