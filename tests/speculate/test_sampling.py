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
    assert found is not None
    assert (found["prompts"], found["replies_per_side"], found["holds"]) == (3, 300, False)
    assert found["p_value"] == 1 / (1 + SHUFFLES)


def test_prompts_are_strata_and_never_mixed() -> None:
    """Two prompts with nothing in common, equal on both sides: mixing them would see no difference either, but with unequal
    numbers per prompt it would see one that is not there."""
    first, second = [[1, 1]] * 30, [[2, 2]] * 30
    found = same_distribution([(first, first[:10]), (second[:10], second)])
    assert found is not None
    assert found["p_value"] == 1.0


def test_nothing_sampled_says_nothing() -> None:
    assert same_distribution([]) is None


def faulty(random: np.random.Generator, weights: list[float], count: int, share: float) -> list[list[int]]:
    """Draws with the likeliest token, 0, put in their place at `share` of the positions."""
    replies = np.array(draw(random, weights, count))
    return np.where(random.random(replies.shape) < share, 0, replies).tolist()  # type: ignore[no-any-return]


def test_the_fault_that_is_said_to_be_found_is_found_that_often() -> None:
    """The stated power, 80 % at the stated share, against real runs of the whole test on real faults of that size."""
    random = np.random.default_rng(1)
    weights = [0.4, 0.3, 0.2, 0.1]
    stated = same_distribution([(draw(random, weights, 80), draw(random, weights, 80))])
    assert stated is not None
    share = stated["found_share"]
    assert 0.1 <= share <= 0.5
    found = [
        not same["holds"]
        for seed in range(40)
        if (same := same_distribution([(draw(random, weights, 80), faulty(random, weights, 80, share))], seed=seed))
    ]
    assert np.mean(found) >= 0.6  # 80 % stated; 60 % of 40 is its 0.3rd percentile


def test_more_replies_find_smaller_faults_and_too_few_none() -> None:
    random = np.random.default_rng(2)
    weights = [0.4, 0.3, 0.2, 0.1]
    shares = [
        same_distribution([(draw(random, weights, count), draw(random, weights, count))])["found_share"]  # type: ignore[index]
        for count in (6, 60, 600)
    ]
    assert shares[0] is None
    assert shares[2] < shares[1]
