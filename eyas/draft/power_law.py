"""Accept length as a saturating power law of records and optimizer steps, with an interval.

    L(n, s) = a − b·(n / n₀)^−β − c·(s / s₀)^−γ        1 ≤ a ≤ K + 1,  b ≥ 0,  c ≥ 0

for n records and s steps; n₀ and s₀ are the smallest measured. Power laws in data: Hestness et al. 2017
(arXiv:1712.00409); the sum of one term for each resource: Hoffmann et al. 2022 (arXiv:2203.15556, eq. 2), there for
the loss. The two exponents run over a grid, all equally likely beforehand; given them the law is linear, so its
posterior under Gaussian errors is exact and is sampled, and draws outside the bounds are dropped. No fit of three
coefficients and two exponents to half a dozen points says more than that, so every answer is a median with an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EXPONENTS = np.linspace(0.1, 1.2, 12)
"""Of both terms. Published ones of data lie between 0.07 and 0.5 for losses; steps can saturate faster."""
DRAWS = 400
"""Draws for each pair of exponents: 57,600 in all, before the bounds."""
SEED_ERROR = 0.01
"""Standard deviation of the accept length between trainings that differ in their seed alone."""
INTERVAL = (0.1, 0.5, 0.9)
"""Quantiles of an answer: 80 %, as the forecast of hours gives."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One training: what it saw, and what its replay on the held-out replies counted."""

    records: int
    steps: int
    accept_length: float
    verifications: int

    def error(self, num_draft_tokens: int) -> float:
        """Standard error: accepted runs in [0, K] with mean m vary by at most m·(K − m) (Bhatia, Davis 2000); seeds differ."""
        mean = min(max(self.accept_length - 1, 0.0), float(num_draft_tokens))
        return float((mean * (num_draft_tokens - mean) / max(self.verifications, 1) + SEED_ERROR**2) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Law:
    """Weighted draws of the law's five numbers."""

    draws: Array  # [N, 5]: a, b, c, β, γ
    weights: Array  # [N], of sum 1
    records: int  # n₀
    steps: int  # s₀

    def lengths(self, records: float, steps: float) -> Array:
        """Accept length at (records, steps) of every draw, at least 1."""
        a, b, c, beta, gamma = self.draws.T
        found: Array = np.maximum(1.0, a - b * (records / self.records) ** -beta - c * (steps / self.steps) ** -gamma)
        return found

    def quantiles(self, values: Array) -> tuple[float, float, float]:
        """Low, median and high of one value per draw."""
        order = np.argsort(values)
        cumulated = np.cumsum(self.weights[order])
        found = values[order][np.minimum(np.searchsorted(cumulated, INTERVAL), len(values) - 1)]
        return float(found[0]), float(found[1]), float(found[2])


def fit_law(points: Sequence[Point], num_draft_tokens: int, *, seed: int = 0) -> Law:
    """The law given `points` of one run's trainings, replayed with chains of K = `num_draft_tokens`.

    Raises `ValueError` for fewer than two points: nothing can be said of a slope then.
    """
    if len(points) < 2:
        raise ValueError(f"{len(points)} points make no learning curve; wanted at least 2")
    K = num_draft_tokens
    records, steps = min(point.records for point in points), min(point.steps for point in points)
    n = np.array([point.records / records for point in points])
    s = np.array([point.steps / steps for point in points])
    errors = np.array([point.error(K) for point in points])
    y = np.array([point.accept_length for point in points]) / errors  # [P], whitened
    beta, gamma = (grid.ravel() for grid in np.meshgrid(EXPONENTS, EXPONENTS))  # [G]
    design = np.stack([np.broadcast_to(1.0, (len(beta), len(n))), -(n ** -beta[:, None]), -(s ** -gamma[:, None])], -1)
    design = design / errors[:, None]  # [G, P, 3]
    center, spread = np.array([(K + 2) / 2, 0.0, 0.0]), float(K)  # a wide Gaussian beforehand, which the bounds cut
    precision = design.transpose(0, 2, 1) @ design + np.eye(3) / spread**2  # [G, 3, 3]
    moment = design.transpose(0, 2, 1) @ y[:, None] + (center / spread**2)[:, None]
    mean = np.linalg.solve(precision, moment)  # [G, 3, 1]
    evidence = 0.5 * (moment * mean).sum((1, 2)) - 0.5 * np.linalg.slogdet(precision)[1]  # log, up to a constant
    root = np.linalg.cholesky(precision)  # precision = R Rᵀ; R⁻ᵀ z has its inverse as covariance
    noise = np.random.default_rng(seed).standard_normal((len(beta), 3, DRAWS))
    coefficients = (mean + np.linalg.solve(root.transpose(0, 2, 1), noise)).transpose(0, 2, 1).reshape(-1, 3)
    weights = np.repeat(np.exp(evidence - evidence.max()), DRAWS)
    draws = np.column_stack([coefficients, np.repeat(beta, DRAWS), np.repeat(gamma, DRAWS)])
    a, b, c = coefficients.T
    is_possible = (a >= 1) & (a <= K + 1) & (b >= 0) & (c >= 0)
    if weights[is_possible].sum() < 1e-3 * weights.sum():  # falling with data: the flattest law is the honest one
        flat = np.average([point.accept_length for point in points], weights=errors**-2)
        draws = np.array([[flat, 0.0, 0.0, 1.0, 1.0]]) + np.outer(
            np.random.default_rng(seed).standard_normal(DRAWS), [errors.max(), 0, 0, 0, 0]
        )
        return Law(draws=draws, weights=np.full(DRAWS, 1 / DRAWS), records=records, steps=steps)
    draws, weights = draws[is_possible], weights[is_possible]
    return Law(draws=draws, weights=weights / weights.sum(), records=records, steps=steps)
