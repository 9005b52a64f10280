"""Gates and the canary: what counts as suspicious, when it warns, when it stops.

- answer filed as reasoning: https://github.com/sgl-project/sglang/issues/37645,
  https://github.com/sgl-project/sglang/pull/33995
- close tag only, because the prompt opened the block: https://github.com/huggingface/trl/pull/6363
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import GateError
from eyas.generation.config import GateConfig, GatesConfig
from eyas.generation.gates import Gates, Marks, has_loop
from eyas.generation.session import generate
from eyas.workspace import RunFolder
from tests.generation.conftest import tokenized_rows
from tests.sglang.loopback import CLOSE_ID, OPEN_ID, LoopbackServer
from tests.sglang.tiny import tiny_config, write_prompts


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([7] * 20 + [2], True),
        ([1, 2, 3] * 7 + [2], False),
        ([9, *([1, 2, 3] * 8), 99], True),
        (list(range(40)) * 9 + [2], True),
        (list(range(500)), False),
        ([5] * 10 + [2], False),
        ([], False),
        ([2], False),
    ],
)
def test_a_loop_is_a_block_said_eight_times_at_the_end(ids: list[int], loops: bool) -> None:
    assert has_loop(ids) is loops


def test_a_gate_warns_once_and_stops_at_its_level() -> None:
    gates = Gates("a", GatesConfig(window=50, min_replies=10))
    warnings = [name for number in range(50) for name in gates.add(Marks(empty=number >= 41))]
    assert warnings == ["empty"]
    with pytest.raises(GateError, match="dataset a: 20% of the last 50 replies are empty"):
        gates.add(Marks(empty=True))


def test_a_share_at_the_limit_is_not_above_it() -> None:
    """A cap that is short on purpose: every reply is cut, and `warn: 1.0` says that this is no news."""
    accepted = Gates("a", GatesConfig(cut_by_length=GateConfig(warn=1.0, stop=1.0)))
    half = Gates("a", GatesConfig(window=20, cut_by_length=GateConfig(warn=0.5, stop=1.0)))
    assert [name for _ in range(200) for name in accepted.add(Marks(cut_by_length=True))] == []
    assert accepted.breached() == []
    for number in range(20):
        assert half.add(Marks(cut_by_length=number % 2 == 1)) == []
    assert half.add(Marks(cut_by_length=True)) == ["cut_by_length"]  # in place of one that was not cut
    assert half.breached() == ["cut_by_length"]
    assert half.describe("cut_by_length") == "dataset a: 55% of the last 20 replies are cut_by_length"


async def test_a_gate_is_told_once(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(target, {"a": 4}, generation={"gates": {"min_replies": 4}})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 30)
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url])
    warnings = [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING" and "cut_by_length" in record.getMessage()
    ]
    assert len(warnings) == 1, warnings
    assert "(warns above 30%)" in warnings[0]


async def test_what_is_waited_for_is_said_once_and_in_order(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 4, "b": 4}, generation={"canary": 2, "proof_prompts": 3})
    run = RunFolder(tmp_path).create()
    for name in ("a", "b"):
        write_prompts(run, config, name, 5)
    said: list[str] = []
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url], say=said.append)
    assert [text.split(":")[0] for text in said] == ["proofs", "proofs", "canary"]
    assert "every server (1)" in said[0]
    assert "3 prompts" in said[1]
    assert "first 2 replies" in said[2]


def test_old_replies_leave_the_window() -> None:
    gates = Gates("a", GatesConfig(window=10, min_replies=4))
    for number in range(40):
        gates.add(Marks(repetition=number < 5))
    assert gates.shares()["repetition"] == 0.0
    assert gates.breached() == []


async def test_missing_reasoning_stops_in_the_canary_and_shows_a_reply(thinking_target: Path, tmp_path: Path) -> None:
    config = tiny_config(thinking_target, {"a": 200}, generation={"canary": 8})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 100)
    with LoopbackServer(thinking_target, reasons=False) as server, pytest.raises(GateError) as caught:
        await generate(run, config, urls=[server.url])
    assert len(server.payloads) == 8
    message = str(caught.value)
    assert "no_reasoning" in message
    assert "target.reasoning" in message
    shown, _ = server.answer(server.payloads[0]["input_ids"], 200)
    assert server.tokenizer.decode(shown)[:20] in message or "…" in message or "<|im_end|>" in message


async def test_reasoning_is_split_by_ids_and_training_ids_are_prompt_plus_output(thinking_target: Path, tmp_path: Path) -> None:
    config = tiny_config(thinking_target, {"a": 200})
    run = RunFolder(tmp_path).create()
    prompts = write_prompts(run, config, "a", 20)
    with LoopbackServer(thinking_target) as server:
        manifests = await generate(run, config, urls=[server.url])
    for row, prompt in zip(tokenized_rows(run, "a"), prompts, strict=True):
        output, _ = server.answer(prompt["input_ids"], 200)
        assert row["input_ids"] == prompt["input_ids"] + output
        assert row["input_ids"].count(OPEN_ID) == row["input_ids"].count(CLOSE_ID) == 1
        start, end = row["spans"]["reasoning"]
        assert start == len(prompt["input_ids"])
        assert row["input_ids"][end] == CLOSE_ID
        assert row["spans"]["answer"] == [end + 1, len(row["input_ids"]) - 1]
    assert manifests["a"].figures["share_with_reasoning"] == 1.0


async def test_a_stopped_dataset_leaves_the_others_running_and_keeps_its_replies(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 200, "b": 200})
    run = RunFolder(tmp_path).create()
    bad = {row["id"] for row in write_prompts(run, config, "a", 60)}
    write_prompts(run, config, "b", 30)
    seen: list[str] = []

    def behave(payload: dict[str, object], nth: int) -> str | None:
        is_bad = str(payload["rid"]).split("-")[1] in bad
        seen.extend(["x"] * is_bad)
        return "truncated" if is_bad and len(seen) > 10 else None

    with LoopbackServer(target, behave=behave, max_running_requests=4) as server, pytest.raises(GateError, match="rejected"):
        await generate(run, config, urls=[server.url])
    assert len(tokenized_rows(run, "b")) == 30
    assert len(tokenized_rows(run, "a")) == 10
