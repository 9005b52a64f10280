"""Filters and draws against slow versions; the rejection sampler's distribution against the target's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eyas.engine.drawing import draw, filtered_probs, sample, uniform
from eyas.engine.sampling import SamplingParams, apply_rules
from eyas.speculate.decoding import accept_greedy, accept_sampled, draft_chain


def slow_filter(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, top-p (mass before the token) and min-p over tokens in descending order."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept: dict[int, float] = {}
    mass = 0.0
    for rank, token in enumerate(order):
        is_inside = mass < params.top_p and (params.top_k < 1 or rank < params.top_k)
        if is_inside and probs[token] >= params.min_p * probs[order[0]]:
            kept[token] = probs[token]
        mass += probs[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(probs))]


@pytest.mark.parametrize(
    "named",
    [
        {"top_p": 0.7},
        {"top_k": 5},
        {"top_k": 400, "top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.2, "temperature": 0.7},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 5.0, "top_p": 0.95},
    ],
)
def test_filters_equal_a_slow_version(named: dict[str, float]) -> None:
    torch.manual_seed(0)
    params = SamplingParams(**{"temperature": 1.0, **named})
    logits = torch.randn(3, 700) * 2
    seen = filtered_probs(logits, [params, SamplingParams(), params])
    for row in (0, 2):
        wanted = torch.tensor(slow_filter(logits[row].tolist(), params))
        torch.testing.assert_close(seen[row], wanted, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(seen[1], logits[1].softmax(-1))


def test_draws_follow_the_probabilities_and_never_hit_zero() -> None:
    torch.manual_seed(1)
    probs = torch.rand(500)
    probs[torch.rand(500) < 0.5] = 0
    probs /= probs.sum()
    count = 20_000
    numbers = [uniform(3, position) for position in range(count)]
    tokens = torch.cat([draw(probs.expand(1000, -1), numbers[start : start + 1000]) for start in range(0, count, 1000)])
    seen = torch.bincount(tokens, minlength=500).float()
    assert seen[probs == 0].sum() == 0
    assert chi_square_z(seen, probs) < 4


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (1 - 2**-53, 4), (1.0, 4)])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass(number: float, token: int) -> None:
    """Rounding can reach 1 itself."""
    probs = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]])
    assert draw(probs, [number]).tolist() == [token]
    assert draw(torch.nn.functional.pad(probs, (512, 512)), [number]).tolist() == [512 + token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", [{}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 3}, {"min_p": 0.1, "temperature": 2.0}])
def test_samples_follow_the_slow_filter_whatever_stands_beside(dtype: torch.dtype, named: dict[str, float]) -> None:
    torch.manual_seed(2)
    params = SamplingParams(**{"temperature": 1.0, **named})
    logits = (torch.randn(3, 301) * 2).to(dtype)
    wanted = torch.tensor(slow_filter(logits[1].tolist(), params))
    count = 5_000
    numbers = [uniform(7, position) for position in range(count)]
    tokens = sample(logits, [1] * count, [params] * count, numbers)
    seen = torch.bincount(torch.tensor(tokens), minlength=301).float()
    assert seen[wanted == 0].sum() == 0
    assert chi_square_z(seen, wanted) < 4
    among_others = sample(logits, [0, 1, 2], [SamplingParams(top_k=1), params, SamplingParams()], [0.1, numbers[0], 0.9])
    assert among_others[1] == tokens[0]


def test_rows_so_flat_that_the_cut_goes_down_keep_what_the_slow_filter_keeps() -> None:
    """One token of weight 1 and 4,000 of about 1e-4, a third of the mass together: top-p 0.9 reaches far into them."""
    logits = torch.cat([torch.zeros(1), torch.full((4_000,), -9.0) - torch.arange(4_000) / 10_000])[None]
    for top_p, kept in ((0.6, 1), (0.9, 2_000)):
        params = SamplingParams(top_p=top_p)
        seen, wanted = filtered_probs(logits, [params])[0], torch.tensor(slow_filter(logits[0].tolist(), params))
        assert int((wanted > 0).sum()) >= kept
        assert abs(int((seen > 0).sum()) - int((wanted > 0).sum())) <= 1, "but for the rounding at the edge"
        torch.testing.assert_close(seen, wanted, atol=1e-3, rtol=1e-3)


def test_tokens_that_a_rule_forbids_are_never_drawn() -> None:
    logits = torch.zeros(1, 40)
    logits[0, ::2] = -math.inf
    numbers = [position / 200 for position in range(200)]
    tokens = sample(logits, [0] * 200, [SamplingParams()] * 200, numbers)
    assert sorted(set(tokens)) == list(range(1, 40, 2))


def test_of_equal_tokens_top_k_keeps_the_first() -> None:
    seen = filtered_probs(torch.zeros(1, 50), [SamplingParams(top_k=3)])
    assert seen[0].nonzero()[:, 0].tolist() == [0, 1, 2]


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    values = torch.tensor([uniform(seed, position) for seed in range(50) for position in range(200)], dtype=torch.float64)
    assert len(set(values.tolist())) == values.numel()
    assert abs(float(values.mean()) - 0.5) < 0.015
    assert abs(float(values.var()) - 1 / 12) < 0.005
    assert uniform(1, 2) == uniform(1, 2)


def test_penalties_change_the_rows_as_defined() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((3, 1.5),))
    row = torch.tensor([1.0, -1.0, 4.0, 0.0])
    apply_rules(row, params, [0], [1, 2, 2], {3})
    # repetition first (positive halves, negative doubles), then 0.5 per occurrence and 0.25 once, in the reply only
    assert row.tolist() == [0.5, -2.0 - 0.75, 2.0 - 1.25, 1.5]


def test_greedy_acceptance_keeps_the_matching_run_and_the_targets_next() -> None:
    assert accept_greedy([7, 8, 9], [7, 8, 9, 1]) == [7, 8, 9, 1]
    assert accept_greedy([7, 8, 9], [7, 5, 9, 1]) == [7, 5]
    assert accept_greedy([7, 8, 9], [6, 8, 9, 1]) == [6]


def test_the_chain_feeds_each_proposal_and_state_to_the_next_step() -> None:
    calls: list[tuple[int, list[int], float]] = []

    def advance(step: int, tokens: Tensor, states: Tensor) -> Tensor:
        calls.append((step, tokens.tolist(), float(states[0, 0])))
        return states + 1

    chain = draft_chain(torch.zeros(2, 1), num_drafts=3, propose=lambda s: (s[:, 0] * 10).long(), advance=advance)
    assert chain.tolist() == [[0, 10, 20]] * 2
    assert calls == [(1, [0, 0], 0.0), (2, [10, 10], 1.0)]


def chi_square_z(seen: Tensor, probs: Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean, over cells with an expected count ≥ 5."""
    expected = probs * seen.sum()
    big = expected >= 5
    rest_seen, rest_expected = seen[~big].sum(), expected[~big].sum()
    statistic = ((seen[big] - expected[big]) ** 2 / expected[big]).sum()
    cells = int(big.sum())
    if rest_expected > 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    return float((statistic - (cells - 1)) / math.sqrt(2 * (cells - 1)))


@pytest.mark.parametrize("draft_rank", [0, 3, 40])
def test_rejection_sampling_keeps_the_targets_joint_distribution(draft_rank: int) -> None:
    """Two drafts that are always proposed, from likely to very unlikely; pairs of tokens are distributed as by the target."""
    torch.manual_seed(draft_rank)
    num_tokens, count = 12, 5_000
    first = (torch.randn(num_tokens) * 1.5).softmax(0)
    second = (torch.randn(num_tokens, num_tokens) * 1.5).softmax(-1)  # given the first token
    third = torch.full((num_tokens,), 1 / num_tokens)
    order = first.argsort(descending=True)
    draft = [int(order[min(draft_rank, num_tokens - 1)]), 5]
    rows = torch.stack([first, second[draft[0]], third])
    seen = torch.zeros(num_tokens, num_tokens)
    for trial in range(count):
        numbers = [(uniform(trial, 2 * place), uniform(trial, 2 * place + 1)) for place in range(3)]
        tokens = accept_sampled(draft, rows, numbers, draw)
        if len(tokens) == 1:  # rejected: the next step draws the second token from the target after the first
            tokens.append(int(draw(second[tokens[0]][None], [uniform(trial, 99)])))
        seen[tokens[0], tokens[1]] += 1
    assert chi_square_z(seen.flatten(), (first[:, None] * second).flatten()) < 4
