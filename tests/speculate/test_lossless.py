"""Identical, tie or wrong, judged by a tiny real target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from eyas.speculate.lossless import LocalJudge, first_difference, judge
from tests.speculate.conftest import greedy as slow_greedy

K = 3


def refuse(*args: object) -> tuple[float, float]:
    raise AssertionError("nothing is to be measured here")


@pytest.fixture(scope="module")
def greedy(model: Any) -> tuple[list[int], list[int]]:
    prompt = [5, 17, 40, 3]
    return prompt, slow_greedy(model, prompt, 40, [])


@pytest.mark.parametrize(
    ("expected", "seen", "position"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)]
)
def test_first_difference(expected: list[int], seen: list[int], position: int | None) -> None:
    assert first_difference(expected, seen) == position


def test_equal_replies_are_identical_and_cost_no_forward(greedy: tuple[list[int], list[int]]) -> None:
    prompt, reply = greedy
    assert judge(refuse, prompt, reply, list(reply)).outcome == "identical"


@pytest.mark.parametrize("position", [0, 1, 5, 30])
def test_token_the_target_would_not_choose_is_wrong(model: Any, greedy: tuple[list[int], list[int]], position: int) -> None:
    prompt, reply = greedy
    seen = list(reply)
    seen[position] = (reply[position] + 1) % 96
    verdict = judge(LocalJudge(model, K), prompt, reply, seen)
    assert (verdict.outcome, verdict.position) == ("wrong", position)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + reply[:position]])).logits[0, -1]
    assert verdict.gap == pytest.approx((logits[reply[position]] - logits[seen[position]]).abs().item(), abs=1e-4)


def test_reply_that_is_cut_or_goes_on_is_wrong(greedy: tuple[list[int], list[int]]) -> None:
    prompt, reply = greedy
    assert judge(refuse, prompt, reply, reply[:-1]).outcome == "wrong"
    assert judge(refuse, prompt, reply, [*reply, 1]).outcome == "wrong"


def test_exact_tie_of_the_target_is_a_tie(model: Any, greedy: tuple[list[int], list[int]]) -> None:
    """Two tokens with the same output row have the same logit: either is the target's own."""
    prompt, reply = greedy
    twin = torch.nn.Linear(32, 96, bias=False)
    other = (reply[7] + 1) % 96
    with torch.no_grad():
        twin.weight.copy_(model.lm_head.weight)
        twin.weight[other] = twin.weight[reply[7]]
    original, model.lm_head = model.lm_head, twin
    try:
        verdict = judge(LocalJudge(model, K), prompt, reply, [*reply[:7], other, *reply[8:]])
    finally:
        model.lm_head = original
    assert (verdict.outcome, verdict.gap) == ("tie", 0.0)


def test_epsilon_grows_with_the_rounding_of_the_precision(model: Any, greedy: tuple[list[int], list[int]]) -> None:
    prompt, reply = greedy
    _, fine = LocalJudge(model, K)(prompt, reply[:30], (1, 2))
    low = LlamaForCausalLM(model.config).eval()
    low.load_state_dict(model.state_dict())
    _, coarse = LocalJudge(low.bfloat16(), K)(prompt, reply[:30], (1, 2))
    assert fine < 1e-5 < coarse < 0.1
