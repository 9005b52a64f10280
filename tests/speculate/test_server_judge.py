"""Ties measured through the servers themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from eyas.sglang.config import ServerConfig
from eyas.speculate.config import DraftShape
from eyas.speculate.load import Server
from eyas.speculate.lossless import LocalJudge, judge
from eyas.speculate.results import Side
from eyas.speculate.server_judge import ServerJudge
from tests.speculate.conftest import FakeEngine, greedy, served

PROMPT = [5, 17, 40, 3]


@pytest.fixture
def engines(model: Any) -> list[FakeEngine]:
    return [FakeEngine(model), FakeEngine(model, accepted=1)]


@pytest.fixture
def server_judge(engines: list[FakeEngine]) -> Iterator[ServerJudge]:
    with served(engines[0]) as off, served(engines[1]) as on:
        yield ServerJudge(Given(off, on), DraftShape(num_steps=3))  # type: ignore[arg-type]


class Given:
    """Two running servers; the order in which they were asked for is written down."""

    def __init__(self, off: str, on: str) -> None:
        self.urls, self.asked = {"off": off, "on": on}, list[str]()

    def get(self, side: Side, shape: DraftShape) -> Server:
        self.asked.append(side)
        return Server(url=self.urls[side], config=ServerConfig(), has_draft=side == "on", stop_token_ids=(2,))


def test_gap_is_the_targets_own(model: Any, server_judge: ServerJudge) -> None:
    reply = greedy(model, PROMPT, 8, [])
    runner_up = second_choice(model, reply[:5])
    gap, epsilon = server_judge(PROMPT, reply[:5], (reply[5], runner_up))
    assert gap == pytest.approx(LocalJudge(model, 3)(PROMPT, reply[:5], (reply[5], runner_up))[0], abs=1e-4)
    assert epsilon == 0.0  # two servers of the very same arithmetic
    assert judge(server_judge, PROMPT, reply, [*reply[:5], runner_up, *reply[6:]]).outcome == "wrong"


def second_choice(model: Any, common: list[int]) -> int:
    import torch

    with torch.inference_mode():
        return int(model(torch.tensor([PROMPT + common])).logits[0, -1].topk(2).indices[1])


def test_flip_within_the_difference_of_the_two_servers_is_a_tie(
    model: Any, engines: list[FakeEngine], server_judge: ServerJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = greedy(model, PROMPT, 8, [])
    runner_up = second_choice(model, reply[:5])
    gap, _ = server_judge(PROMPT, reply[:5], (reply[5], runner_up))
    top = [[-1.0, reply[5], None], [-1.0 - gap, runner_up, None]]
    engines[1].meta_changes = {"output_top_logprobs": [[]] * 5 + [[[-1.0, runner_up, None], [-1.0 - 2 * gap, reply[5], None]]]}
    engines[0].meta_changes = {"output_top_logprobs": [[]] * 5 + [top]}
    fresh = ServerJudge(server_judge._servers, server_judge._shape)
    assert judge(fresh, PROMPT, reply, [*reply[:5], runner_up, *reply[6:]]).outcome == "tie"


def test_token_that_no_server_thinks_likely_is_wrong(server_judge: ServerJudge, model: Any, engines: list[FakeEngine]) -> None:
    reply = greedy(model, PROMPT, 8, [])
    engines[0].meta_changes = {"output_top_logprobs": [[[-1.0, reply[0], None]]]}
    assert server_judge(PROMPT, [], (reply[0], (reply[0] + 1) % 96)) == (math.inf, 0.0)


def test_server_that_does_not_repeat_itself_excuses_nothing(
    server_judge: ServerJudge, engines: list[FakeEngine], model: Any
) -> None:
    reply = greedy(model, PROMPT, 8, [])
    engines[1].change = lambda ids: [(ids[0] + 1) % 96, *ids[1:]]
    assert server_judge(PROMPT, reply[:3], (reply[3], 1)) == (math.inf, 0.0)


def test_a_reply_with_an_earlier_flip_is_judged_at_its_own_place(model: Any, server_judge: ServerJudge) -> None:
    """Under load a tie may have flipped long before; no server repeats that on its own, so it is given as prompt."""
    flipped = second_choice(model, [])
    common = [flipped, *greedy(model, [*PROMPT, flipped], 20, [])]
    tokens = (greedy(model, [*PROMPT, *common], 1, [])[0], second_choice(model, common))
    wanted, _ = LocalJudge(model, 3)(PROMPT, common, tokens)
    assert server_judge(PROMPT, common, tokens)[0] == pytest.approx(wanted, abs=1e-4)


def test_all_ties_of_one_side_are_asked_before_the_other(model: Any, server_judge: ServerJudge) -> None:
    """One host would otherwise be restarted twice for every tie."""
    reply = greedy(model, PROMPT, 8, [])
    for length in (2, 3, 4):
        assert server_judge.note(PROMPT, reply[:length], (reply[length], 1)) == (0.0, 0.0)
    server_judge.ask()
    assert server_judge._servers.asked == ["off"] * 3 + ["on"] * 3  # type: ignore[attr-defined]
    server_judge(PROMPT, reply[:3], (reply[3], 1))
    assert len(server_judge._servers.asked) == 6  # type: ignore[attr-defined]
