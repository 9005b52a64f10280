"""The law through the points of a learning curve: known curves are found again, and intervals hold what they promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eyas.draft.power_law import SEED_ERROR, Point, fit_law

K = 4
SIZES = (2_000, 5_000, 10_000)
TOTAL = 88_000


def truth(a: float, b: float, c: float, beta: float, gamma: float, records: float, steps: float) -> float:
    """The law, written out."""
    return a - b * (records / 2_000) ** -beta - c * (steps / 500) ** -gamma


def points_of(law: tuple[float, float, float, float, float], noise: np.random.Generator | None = None) -> list[Point]:
    """Each size trained for all and a quarter of its steps (a step a record), measured in 20,000 verifications."""
    points = []
    for records in SIZES:
        for steps in (records // 4, records):
            exact = truth(*law, records, steps)
            point = Point(records=records, steps=steps, accept_length=exact, verifications=20_000)
            if noise is not None:
                point = replace(point, accept_length=exact + noise.normal() * point.error(K))
            points.append(point)
    return points


def test_a_curve_without_noise_is_continued_to_the_whole_run() -> None:
    law = (2.9, 0.8, 0.4, 0.5, 0.8)
    exact = [replace(point, verifications=10**9) for point in points_of(law)]
    low, median, high = (fitted := fit_law(exact, K)).quantiles(fitted.lengths(TOTAL, TOTAL))
    assert median == pytest.approx(truth(*law, TOTAL, TOTAL), abs=0.03)
    assert low <= truth(*law, TOTAL, TOTAL) <= high


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """An 80 % interval for the whole run, nine times beyond the largest point; 240 random curves, within three standard errors."""
    noise = np.random.default_rng(3)
    inside, widths, count = 0, [], 0
    while count < 240:
        law = (
            noise.uniform(1.5, 4.5),
            noise.uniform(0, 1.5),
            noise.uniform(0, 1.0),
            noise.uniform(0.1, 1.2),
            noise.uniform(0.1, 1.2),
        )
        if min(point.accept_length for point in points_of(law)) < 1.1:
            continue
        count += 1
        fitted = fit_law(points_of(law, noise), K, seed=count)
        low, _, high = fitted.quantiles(fitted.lengths(TOTAL, TOTAL))
        inside += low <= truth(*law, TOTAL, TOTAL) <= high
        widths.append(high - low)
    assert abs(inside / count - 0.8) < 3 * (0.8 * 0.2 / count) ** 0.5 + 0.02
    assert np.median(widths) < 0.6, "and is no excuse for saying nothing"


def test_a_curve_that_has_saturated_says_that_the_rest_buys_nothing() -> None:
    flat = [replace(point, accept_length=2.4, verifications=200_000) for point in points_of((2.4, 0, 0, 1, 1))]
    law = fit_law(flat, K)
    low, median, high = law.quantiles(law.lengths(TOTAL, TOTAL) - law.lengths(10_000, 10_000))
    assert 0 <= low <= median < 0.03
    assert high < 0.1


def test_more_steps_and_more_records_are_told_apart() -> None:
    by_steps = fit_law(points_of((2.8, 0.0, 0.8, 0.5, 0.6)), K)
    by_records = fit_law(points_of((2.8, 0.8, 0.0, 0.6, 0.5)), K)
    gains = {}
    for name, law in (("steps", by_steps), ("records", by_records)):
        more_steps = law.quantiles(law.lengths(10_000, 40_000) - law.lengths(10_000, 10_000))[1]
        more_records = law.quantiles(law.lengths(40_000, 10_000) - law.lengths(10_000, 10_000))[1]
        gains[name] = (more_steps, more_records)
    assert gains["steps"][0] > 2 * gains["steps"][1]
    assert gains["records"][1] > 2 * gains["records"][0]


def test_no_answer_leaves_what_a_chain_can_give() -> None:
    law = fit_law(points_of((4.9, 2.0, 0.5, 0.9, 0.9)), K)
    assert law.quantiles(law.lengths(10**9, 10**9))[2] <= K + 1


def test_a_curve_that_falls_is_taken_for_flat() -> None:
    points = [Point(records=n, steps=n, accept_length=3.0 - n / 5_000, verifications=10**6) for n in SIZES]
    law = fit_law(points, K)
    assert law.quantiles(law.lengths(TOTAL, TOTAL))[1] < 3.0


def test_the_error_of_a_point_is_that_of_its_runs_and_of_the_seed() -> None:
    """Runs that are all or nothing vary most: half of them K and half 0 have mean K / 2 and variance K² / 4."""
    point = Point(records=1, steps=1, accept_length=1 + K / 2, verifications=100)
    assert point.error(K) == pytest.approx((K**2 / 4 / 100 + SEED_ERROR**2) ** 0.5)


def test_one_point_makes_no_curve() -> None:
    with pytest.raises(ValueError, match="1 points make no learning curve"):
        fit_law(points_of((2, 0.1, 0.1, 0.5, 0.5))[:1], K)
