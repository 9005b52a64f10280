"""The two-sample test of the sampled distribution, against draws whose distribution is known."""

from __future__ import annotations

import numpy as np

from eyas.speculate.sampling import SHUFFLES, same_distribution


def draw(random: np.random.Generator, weights: list[float], count: int) -> list[list[int]]:
    return random.choice(len(weights), size=(count, 4), p=weights).tolist()  # type: ignore[no-any-return]


def test_p_values_of_equal_sides_are_uniform() -> None:
    random = np.random.default_rng(0)
    values = []
    for seed in range(60):
        sides = (draw(random, [0.5, 0.3, 0.1, 0.05, 0.05], 25), draw(random, [0.5, 0.3, 0.1, 0.05, 0.05], 25))
        found = same_distribution([sides], seed=seed)
        assert found is not None
        values.append(found["p_value"])
    assert 0.35 < np.mean(values) < 0.65
    assert sum(value < 0.1 for value in values) <= 13  # 6 expected; 13 is beyond the 99.7th percentile


def test_a_sampler_that_prefers_the_drafts_token_is_found() -> None:
    """Keeping a draft with too large a probability moves mass to it: 0.30 became 0.45 here."""
    random = np.random.default_rng(0)
    weights, moved = [0.3, 0.3, 0.4], [0.45, 0.235, 0.315]
    found = same_distribution([(draw(random, weights, 100), draw(random, moved, 100)) for _ in range(3)])
    assert found == {"prompts": 3, "replies_per_side": 300, "p_value": 1 / (1 + SHUFFLES), "holds": False}


def test_prompts_are_strata_and_never_mixed() -> None:
    """Two prompts with nothing in common, equal on both sides: mixing them would see no difference either, but with unequal
    numbers per prompt it would see one that is not there."""
    first, second = [[1, 1]] * 30, [[2, 2]] * 30
    found = same_distribution([(first, first[:10]), (second[:10], second)])
    assert found is not None
    assert found["p_value"] == 1.0


def test_nothing_sampled_says_nothing() -> None:
    assert same_distribution([]) is None
