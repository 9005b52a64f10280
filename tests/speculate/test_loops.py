from __future__ import annotations

import random

import pytest

from eyas.speculate.loops import LOOP_TOKENS, loop_free_tokens


def slow(ids: list[int]) -> int:
    """The written rule, word for word."""
    for start in range(len(ids)):
        run = ids[start : start + LOOP_TOKENS]
        if len(run) == LOOP_TOKENS and any(ids[earlier : earlier + LOOP_TOKENS] == run for earlier in range(start)):
            return start
    return len(ids)


def test_first_round_of_a_loop_is_kept() -> None:
    prose, period = list(range(100, 150)), list(range(10))
    assert loop_free_tokens(prose + period * 5) == len(prose) + len(period)


def test_one_token_for_ever_leaves_one() -> None:
    assert loop_free_tokens([7] * 100) == 1


def test_short_refrains_are_no_loop() -> None:
    refrain = list(range(LOOP_TOKENS - 1))
    ids = [*refrain, 900, *refrain, 901, *refrain]
    assert loop_free_tokens(ids) == len(ids)


def test_paragraph_said_again_later_is_a_loop() -> None:
    paragraph = list(range(LOOP_TOKENS))
    assert loop_free_tokens([*paragraph, 900, 901, *paragraph, 902]) == LOOP_TOKENS + 2


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_rule(seed: int) -> None:
    random_ = random.Random(seed)
    ids = [random_.randrange(2) for _ in range(40)] * random_.randint(1, 3) + [random_.randrange(2) for _ in range(60)]
    assert loop_free_tokens(ids) == slow(ids)


@pytest.mark.parametrize("ids", [[], [1], list(range(LOOP_TOKENS))])
def test_short_replies_are_free_of_loops(ids: list[int]) -> None:
    assert loop_free_tokens(ids) == len(ids)
