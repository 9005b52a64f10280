"""The fault matrix: each misbehaviour of a server ends in one right, counted outcome.

Public reports behind the rows:
- abort with 200: https://github.com/superlinked/sie/pull/284, https://github.com/radixark/miles/pull/3337
- prompt + max_new_tokens above the context: https://github.com/instructlab/sdg/issues/276
- text tokenised again, two BOS: https://github.com/sgl-project/sglang/pull/8291, https://github.com/MakazhanAlpamys/Soup/issues/890
- accepted and never answered: https://github.com/sgl-project/sglang/issues/33858
- idle sockets dropped: https://github.com/NVIDIA-NeMo/Gym/pull/1555
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ConfigError, GateError
from eyas.generation.session import generate
from eyas.manifest import Manifest
from eyas.workspace import RunFolder
from tests.generation.conftest import journal_entries
from tests.sglang.loopback import LoopbackServer
from tests.sglang.tiny import tiny_config, write_prompts

OPEN_GATES = {"gates": {name: {"warn": 1.0, "stop": 1.0} for name in ("rejected", "empty", "repetition", "cut_by_length")}}


@dataclass
class Outcome:
    """What one run with a fault per prompt came to."""

    manifest: Manifest
    entries: dict[str, dict[str, Any]]
    """Journal entry of each fault's prompt, and of the unharmed ones under "ok 0", "ok 1", …"""
    sends: dict[str, int]
    server: LoopbackServer


async def run_with(faults: list[str], target: Path, tmp_path: Path, *, only_once: bool, **server: Any) -> Outcome:
    """Generate a prompt per fault and four more; the server commits each fault on its prompt, once or always."""
    generation = {"max_attempts": 3, "canary": 0, "reject_limit": 1.0, **OPEN_GATES}
    config = tiny_config(target, {"a": 300}, generation=generation, **server)
    run = RunFolder(tmp_path).create()
    rows = write_prompts(run, config, "a", len(faults) + 4)
    names = dict(zip((row["id"] for row in rows), [*faults, *(f"ok {number}" for number in range(4))], strict=True))
    rids: dict[str, list[str]] = {name: [] for name in names.values()}

    def behave(payload: dict[str, Any], nth: int) -> str | None:
        name = names[payload["rid"].split("-")[1]]
        rids[name].append(payload["rid"])
        is_due = not name.startswith("ok ") and (len(rids[name]) == 1 or not only_once)
        return name if is_due else None

    with LoopbackServer(target, behave=behave) as loopback:
        manifests = await generate(run, config, urls=[loopback.url])
    entries = journal_entries(run, "a")
    assert len({entry["id"] for entry in entries}) == len(entries) == len(rows)
    assert all(len(set(sent)) == len(sent) for sent in rids.values()), "a rid was used twice"
    return Outcome(
        manifest=manifests["a"],
        entries={names[entry["id"]]: entry for entry in entries},
        sends={name: len(sent) for name, sent in rids.items()},
        server=loopback,
    )


HEALS = [
    "abort", "finish_null", "finish_missing", "finish_other", "status:429:0", "status:503:0", "status:503", "status:500",
    "status:502", "status:404", "reset_before", "close_before", "reset_during", "wrong_count", "wrong_rid", "no_ids", "text",
    "html", "batch", "nan", "no_matched", "over",
]  # fmt: skip


async def test_a_fault_that_heals_costs_one_retry_and_no_record(target: Path, tmp_path: Path, fast_retries: None) -> None:
    outcome = await run_with(HEALS, target, tmp_path, only_once=True)
    assert outcome.manifest.counts.done == len(HEALS) + 4
    assert outcome.sends == {**dict.fromkeys(HEALS, 2), **{f"ok {number}": 1 for number in range(4)}}
    costs_nothing = {"status:429:0", "status:503:0", "status:503", "close_before"}
    for fault in set(HEALS) - {"reset_before"}:  # a reset may reach the client as a plain close
        assert outcome.entries[fault]["attempt"] == (1 if fault in costs_nothing else 2), fault


REJECTS = {
    "abort_400": "aborted",
    "placeholder": "aborted",
    "status:400": "refused_by_server",
    "status:413": "refused_by_server",
    "status:422": "refused_by_server",
    "truncated": "prompt_truncated",
    "grown": "prompt_grew",
    "prefix": "prompt_in_output",
    "prefix_counted": "prompt_in_output",
    "big_id": "token_out_of_range",
    "no_stop": "stop_token_missing",
    "other_stop": "unexpected_stop",
    "stop_400": "aborted",
    "cut": "cut_too_early",
    "short": "too_short",
}


async def test_a_fault_that_cannot_heal_rejects_its_record_at_once(target: Path, tmp_path: Path, fast_retries: None) -> None:
    outcome = await run_with(list(REJECTS), target, tmp_path, only_once=False)
    assert {fault: outcome.entries[fault]["reject"] for fault in REJECTS} == REJECTS
    assert set(outcome.sends.values()) == {1}
    assert outcome.manifest.counts.rejected == len(REJECTS)
    assert outcome.manifest.counts.done == 4


NEVER_HEAL = {
    "abort": "aborted",
    "wrong_count": "wrong_completion_count",
    "text": "text_mismatch",
    "nan": "unexpected_stop",
    "html": "malformed_reply",
    "status:500": "server_failed",
    "reset_during": "server_failed",
}


async def test_a_fault_that_never_heals_is_rejected_after_the_last_attempt(
    target: Path, tmp_path: Path, fast_retries: None
) -> None:
    outcome = await run_with(list(NEVER_HEAL), target, tmp_path, only_once=False)
    assert {fault: outcome.entries[fault]["reject"] for fault in NEVER_HEAL} == NEVER_HEAL
    assert outcome.sends == {**dict.fromkeys(NEVER_HEAL, 3), **{f"ok {number}": 1 for number in range(4)}}
    assert outcome.manifest.counts.done == 4


async def test_right_ids_with_an_odd_text_are_data_and_counted(target: Path, tmp_path: Path) -> None:
    outcome = await run_with(["no_text", "replacement", "one_id", "fffd"], target, tmp_path, only_once=False)
    assert outcome.manifest.counts.done == 8
    assert outcome.manifest.figures["text_repaired"] == 2


async def test_a_request_past_its_deadline_is_aborted_by_rid_and_tried_again(
    target: Path, tmp_path: Path, fast_retries: None
) -> None:
    outcome = await run_with(["never", "drip"], target, tmp_path, only_once=True, server={"deadline_floor_s": 1.5})
    assert outcome.manifest.counts.done == 6
    assert len(outcome.server.aborted) >= 2, "a slow machine may be late with others, too"


async def test_a_server_slower_than_every_deadline_still_gets_its_replies_through(
    target: Path, tmp_path: Path, fast_retries: None
) -> None:
    config = tiny_config(target, {"a": 300}, server={"deadline_floor_s": 0.12, "min_tokens_per_s": 3000.0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 6)
    with LoopbackServer(target, delay_s=0.3) as loopback:
        manifest = (await generate(run, config, urls=[loopback.url]))["a"]
    assert (manifest.counts.done, manifest.counts.rejected) == (6, 0)


@pytest.mark.parametrize("fault", ["status:401", "status:403", "redirect"])
async def test_a_wrong_key_or_url_stops_the_run_with_a_message(fault: str, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key_file|server\.urls"):
        await run_with([fault], target, tmp_path, only_once=False)


async def test_a_wrong_model_is_refused_before_the_first_prompt(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 300})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 4)
    with LoopbackServer(target, model_path="some/other-model") as loopback, pytest.raises(ConfigError, match="other-model"):
        await generate(run, config, urls=[loopback.url])
    assert loopback.payloads == []


async def test_a_smaller_served_context_is_refused_before_the_first_prompt(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 300})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 4)
    with LoopbackServer(target, context_length=1024) as loopback, pytest.raises(ConfigError, match="1024"):
        await generate(run, config, urls=[loopback.url])


async def test_new_tokens_are_clamped_to_the_context_and_counted(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 5000})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 6)
    with LoopbackServer(target) as loopback:
        manifests = await generate(run, config, urls=[loopback.url])
    assert manifests["a"].figures["clamped"] == 6
    for payload in loopback.payloads:  # SGLang itself cuts at context - 2
        assert len(payload["input_ids"]) + payload["sampling_params"]["max_new_tokens"] == 2046


async def test_a_prompt_without_room_is_a_reject_that_names_it_and_is_never_sent(target: Path, tmp_path: Path) -> None:
    """https://github.com/instructlab/sdg/issues/276: one such row must not end the run, nor go unnamed."""
    settings = {"canary": 0, "reject_limit": 1.0, **OPEN_GATES}
    run = RunFolder(tmp_path).create()
    rows = write_prompts(run, tiny_config(target, {"a": 5000}), "a", 10, with_tools=True)
    long = {row["id"] for row in rows if row["tools"] != "[]"}
    longest = max(len(row["input_ids"]) for row in rows if row["id"] not in long)
    config = tiny_config(target, {"a": 5000}, generation={**settings, "min_new_tokens_room": 2046 - longest})
    with LoopbackServer(target) as loopback:
        manifest = (await generate(run, config, urls=[loopback.url]))["a"]
        assert {payload["rid"].split("-")[1] for payload in loopback.payloads}.isdisjoint(long)
    assert (manifest.counts.done, manifest.counts.rejected, len(long)) == (8, 2, 2)
    rejects = [json.loads(line) for line in (run.responses("a") / "rejects.jsonl").read_bytes().split(b"\n") if line]
    assert {(reject["id"], reject["reason"]) for reject in rejects} == {(id, "no_room") for id in long}
    assert all("a context of 2048 leaves" in reject["detail"] for reject in rejects)


@pytest.mark.parametrize("fault", ["truncated", "nan", "cut"])
async def test_many_refusals_stop_the_dataset_at_its_canary(fault: str, target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 300}, generation={"canary": 8, "max_attempts": 1})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 100)
    with (
        LoopbackServer(target, behave=lambda payload, nth: fault) as loopback,
        pytest.raises(GateError, match="rejected"),
    ):
        await generate(run, config, urls=[loopback.url])
    assert len(loopback.payloads) == 8
