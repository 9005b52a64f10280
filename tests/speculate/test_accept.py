"""Accept length has one definition; everything here is checked against counts made by hand."""

from __future__ import annotations

import random

import pytest

from eyas.errors import ServerError
from eyas.speculate.accept import AcceptCounts, counts_from_sglang, counts_from_vllm, interval, pool, walk


def test_three_steps_accepting_0_2_4_drafts_give_3() -> None:
    """https://github.com/SafeAILab/EAGLE/issues/146, https://github.com/sgl-project/sglang/issues/5256"""
    steps = [AcceptCounts(verifications=1, accepted=accepted) for accepted in (0, 2, 4)]
    assert pool(steps) == AcceptCounts(verifications=3, accepted=6)
    assert pool(steps).accept_length == 3.0


def test_requests_are_pooled_and_not_averaged() -> None:
    """https://github.com/SafeAILab/EAGLE/issues/153: a mean over requests would say 2.0."""
    assert pool([AcceptCounts(verifications=9, accepted=0), AcceptCounts(verifications=1, accepted=2)]).accept_length == 1.2


def test_sglang_reply_with_nothing_accepted_is_1_although_it_says_more_itself() -> None:
    """Counters as recorded from a real server: eight tokens, the first of them from the prefill."""
    meta_info = {"spec_accept_length": 8 / 7, "spec_verify_ct": 7, "spec_num_correct_drafts": 0, "completion_tokens": 8}
    assert counts_from_sglang(meta_info).accept_length == 1.0


def test_drafts_that_sglang_accepts_past_the_end_of_a_reply_do_not_count() -> None:
    """Eight tokens: one of the prefill, then 4 + 3, of which the last verification had accepted one more than were left."""
    meta_info = {"spec_verify_ct": 2, "spec_num_correct_drafts": 7, "completion_tokens": 8}
    assert counts_from_sglang(meta_info) == AcceptCounts(verifications=2, accepted=6)


def test_reply_without_counters_says_that_no_draft_runs() -> None:
    with pytest.raises(ServerError, match=r"spec_verify_ct.*EAGLE3"):
        counts_from_sglang({"id": "r1", "completion_tokens": 3})


def test_vllm_counters_have_the_same_meaning() -> None:
    metrics = {
        "vllm:spec_decode_num_drafts": 10.0,
        "vllm:spec_decode_num_draft_tokens": 30.0,
        "vllm:spec_decode_num_accepted_tokens": 5.0,
    }
    assert counts_from_vllm(metrics) == AcceptCounts(verifications=10, accepted=5)


def test_nothing_verified_is_1() -> None:
    assert AcceptCounts().accept_length == 1.0
    assert interval([AcceptCounts()] * 5) == [1.0, 1.0]


def test_few_replies_have_no_interval() -> None:
    """Resampled, one request gives itself every time, two give their own two values: narrow, which would read as certainty."""
    one, other = AcceptCounts(verifications=20, accepted=9), AcceptCounts(verifications=20, accepted=1)
    assert interval([one]) is interval([one, other]) is interval([one, other] * 2) is None
    low, high = interval([one, other, one, other, one]) or []
    assert 1.05 <= low < 1.29 < high <= 1.45


def test_walk_accepts_runs_of_hits_and_adds_one_token_each() -> None:
    reply = [10, 11, 12, 13, 14, 15, 16]
    drafts = {1: [11, 99, 13], 3: [13, 14, 15], 6: []}
    # at 1: one hit, bonus 12; at 3: not asked; at 3: three hits, bonus 16
    assert walk(reply, 3, lambda position: drafts[position]) == AcceptCounts(verifications=2, accepted=4, histogram=(0, 1, 0, 1))


def test_walk_does_not_count_drafts_past_the_end() -> None:
    assert walk([1, 2], 3, lambda position: [2, 3, 4]).accepted == 1


def test_walk_uses_no_more_than_k_drafts() -> None:
    assert walk([1, 2, 3, 4], 2, lambda position: [2, 3, 4]).accepted == 2


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.7, 1.0])
def test_walk_makes_every_token_once(accuracy: float) -> None:
    """Tokens = 1 of the prefill + verifications + accepted, but for a bonus that would fall past the end."""
    random_ = random.Random(int(accuracy * 10))
    reply = list(range(200))

    def propose(position: int) -> list[int]:
        return [token if random_.random() < accuracy else -1 for token in reply[position : position + 3]]

    counts = walk(reply, 3, propose)
    assert 0 <= 1 + counts.verifications + counts.accepted - len(reply) <= 1


def test_interval_holds_the_pooled_length_and_narrows_with_requests() -> None:
    random_ = random.Random(0)

    def requests(count: int) -> list[AcceptCounts]:
        return [AcceptCounts(verifications=50, accepted=sum(random_.random() < 0.5 for _ in range(50))) for _ in range(count)]

    few, many = requests(8), requests(200)
    assert interval(few)[0] < pool(few).accept_length < interval(few)[1]
    low, high = interval(many)
    assert low < 1.5 < high  # the truth
    assert high - low < 0.04 < interval(few)[1] - interval(few)[0]
    assert interval(many, 0.80)[0] > low


def test_position_rates_are_conditional_on_the_drafts_before() -> None:
    """Ten verifications: 5 accept nothing, 2 one draft, 3 two drafts."""
    counts = pool(
        [
            AcceptCounts(verifications=7, accepted=2, histogram=(5, 2)),
            AcceptCounts(verifications=3, accepted=6, histogram=(0, 0, 3)),
        ]
    )
    assert counts.histogram == (5, 2, 3)
    assert counts.position_rates == [5 / 10, 3 / 5]
