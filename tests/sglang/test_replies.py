"""Replies of a real server pass or fail by the rule that names them; anything else is an error, never data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.sglang.client import error_message
from eyas.sglang.metrics import parse_metrics
from eyas.sglang.replies import AbortedReply, GenerateRequest, Reply, ReplyError, TextMismatch, TooShort, accept
from tests.sglang import recordings


def asked(max_new_tokens: int, stop_token_ids: list[int]) -> GenerateRequest:
    sampling = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids}
    return GenerateRequest(rid="my-rid-1", input_ids=recordings.PROMPT, sampling_params=sampling)


REQUEST = asked(8, [2, 40])


def judge(body: str | bytes, request: GenerateRequest = REQUEST) -> Reply:
    raw = body.encode() if isinstance(body, str) else body
    return accept(
        raw, request, decode=lambda ids: recordings.TEXTS.get(tuple(ids), "?"), vocab_size=49152, where="http://s/generate"
    )


def changed(**meta: Any) -> str:
    body = json.loads(recordings.STOP)
    body["meta_info"].update(meta)
    return json.dumps(body)


def test_a_recorded_stop_passes_with_its_end_token() -> None:
    reply = judge(recordings.STOP)
    assert reply.output_ids[-1] == 2
    assert (reply.finish_reason, reply.text_match, reply.weight_version) == ("stop", "exact", "default")
    assert reply.e2e_s == pytest.approx(5.653, abs=0.001)


def test_weights_that_change_while_a_reply_is_made_are_no_version_of_their_own() -> None:
    pieces = [{"version": "default", "start": 0, "end": 5}, {"version": "v2", "start": 5, "end": 8}]
    assert judge(changed(weight_versions=pieces)).weight_version == "default, v2"


def test_a_recorded_length_passes() -> None:
    assert judge(recordings.LENGTH, asked(3, [2])).finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "cap", "stops", "reason", "can_heal"),
    [
        (recordings.LENGTH, 4, [2], "cut_too_early", False),
        (recordings.LENGTH, 2, [2], "over_the_cap", True),
        (recordings.STOP, 7, [2], "over_the_cap", True),
        (recordings.STOP, 8, [40], "unexpected_stop", False),
        (recordings.STOP.replace('"matched":2', '"matched":"NaN happened"'), 8, [2], "unexpected_stop", True),
        (recordings.STOP.replace('"matched":2', '"matched":null'), 8, [2], "unexpected_stop", True),
        (recordings.STOP.replace(',"matched":2', ""), 8, [2], "unexpected_stop", True),
        (recordings.STOP.replace('"matched":2', '"matched":2,"status_code":400'), 8, [2], "aborted", False),
    ],
)
def test_an_end_that_was_not_asked_for_is_no_data(body: str, cap: int, stops: list[int], reason: str, can_heal: bool) -> None:
    with pytest.raises(ReplyError) as caught:
        judge(body, asked(cap, stops))
    assert (caught.value.reason, caught.value.can_heal) == (reason, can_heal)


def test_a_recorded_abort_is_no_data_and_may_heal() -> None:
    with pytest.raises(AbortedReply) as caught:
        judge(recordings.ABORTED)
    assert caught.value.can_heal


def test_prefill_only_is_too_short() -> None:
    with pytest.raises(TooShort):
        judge(recordings.PREFILL_ONLY, asked(0, [2]))


def test_text_without_the_flags_we_send_is_a_mismatch() -> None:
    body = json.loads(recordings.STOP) | {"text": "The capital of France is Paris."}
    with pytest.raises(TextMismatch):
        judge(json.dumps(body))


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"id": "other"}, "wrong_rid"),
        ({"prompt_tokens": 15}, "prompt_truncated"),
        ({"prompt_tokens": 17}, "prompt_grew"),
        ({"completion_tokens": 7}, "wrong_completion_count"),
        ({"completion_tokens": "8"}, "malformed_reply"),
        ({"completion_tokens": -1}, "malformed_reply"),
        ({"finish_reason": None}, "unknown_finish"),
        ({"finish_reason": {"type": "tool_calls"}}, "unknown_finish"),
        ({"finish_reason": "stop"}, "malformed_reply"),
        ({"finish_reason": {"type": "stop", "matched": 40}}, "stop_token_missing"),
        ({"finish_reason": {"type": "abort", "status_code": 400}}, "aborted"),
    ],
)
def test_each_rule_has_its_own_reason(meta: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReplyError) as caught:
        judge(changed(**meta))
    assert caught.value.reason == reason
    assert "my-rid-1" in str(caught.value)


def test_a_message_never_holds_the_text() -> None:
    for body in (
        changed(completion_tokens=7),
        changed(prompt_tokens=3),
        json.dumps(json.loads(recordings.STOP) | {"text": "Geheim"}),
    ):
        with pytest.raises(ReplyError) as caught:
            judge(body)
        assert "Paris" not in str(caught.value)
        assert "Geheim" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_that_is_no_reply_is_a_reply_error(body: bytes) -> None:
    with pytest.raises(ReplyError):
        judge(body)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "queue_time"]), JSON)
def test_a_field_of_any_other_value_is_an_error_or_the_same_reply(field: str, value: Any) -> None:
    try:
        reply = judge(json.dumps(json.loads(changed(**{field: value}))))
    except ReplyError:
        return
    assert reply.output_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.mark.parametrize(("body", "message"), recordings.ERRORS.items())
def test_every_shape_of_error_gives_its_message(body: str, message: str) -> None:
    assert error_message(body.encode()) == message


def test_metrics_are_summed_over_labels_without_nan() -> None:
    totals = parse_metrics(recordings.METRICS)
    assert totals == {"generation_tokens_total": 50.0, "num_retracted_reqs": 0.0, "routing_keys_active": 0.0}
