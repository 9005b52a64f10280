"""The fault matrix: each misbehaviour of a server ends in one right, counted outcome.

Public reports behind the rows:
- abort with 200: https://github.com/superlinked/sie/pull/284, https://github.com/radixark/miles/pull/3337
- prompt + max_new_tokens above the context: https://github.com/instructlab/sdg/issues/276
- text tokenised again, two BOS: https://github.com/sgl-project/sglang/pull/8291
- accepted and never answered: https://github.com/sgl-project/sglang/issues/33858
- idle sockets dropped: https://github.com/NVIDIA-NeMo/Gym/pull/1555
"""

from __future__ import annotations

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

NUM_PROMPTS = 12
OPEN_GATES = {"gates": {name: {"warn": 1.0, "stop": 1.0} for name in ("rejected", "empty", "repetition", "cut_by_length")}}


async def run_with(fault: str, target: Path, tmp_path: Path, *, only_once: bool, **server: Any) -> tuple[Manifest, LoopbackServer]:
    """Generate twelve prompts; the server commits `fault` on one prompt, once or always."""
    config = tiny_config(
        target, {"a": 300}, generation={"max_attempts": 3, "canary": 0, "reject_limit": 1.0, **OPEN_GATES}, **server
    )
    run = RunFolder(tmp_path).create()
    victim = write_prompts(run, config, "a", NUM_PROMPTS)[5]["id"]
    seen: list[str] = []

    def behave(payload: dict[str, Any], nth: int) -> str | None:
        if victim not in payload["rid"]:
            return None
        seen.append(payload["rid"])
        return fault if len(seen) == 1 or not only_once else None

    with LoopbackServer(target, behave=behave) as loopback:
        manifests = await generate(run, config, urls=[loopback.url])
    entries = journal_entries(run, "a")
    assert len({entry["id"] for entry in entries}) == len(entries) == NUM_PROMPTS
    assert len(set(seen)) == len(seen), "a rid was used twice"
    return manifests["a"], loopback


HEALS = [
    "abort", "finish_null", "finish_missing", "finish_other", "status:429:0", "status:503:0", "status:503", "status:500",
    "status:502", "status:404", "reset_before", "close_before", "reset_during", "wrong_count", "wrong_rid", "no_ids", "text",
    "html", "batch",
]  # fmt: skip


@pytest.mark.parametrize("fault", HEALS)
async def test_a_fault_that_heals_costs_a_retry_and_no_record(fault: str, target: Path, tmp_path: Path, fast_retries: None) -> None:
    manifest, loopback = await run_with(fault, target, tmp_path, only_once=True)
    assert manifest.counts.done == NUM_PROMPTS
    assert len(loopback.payloads) == NUM_PROMPTS + 1


REJECTS = {
    "abort_400": "aborted",
    "placeholder": "aborted",
    "status:400": "refused_by_server",
    "status:413": "refused_by_server",
    "status:422": "refused_by_server",
    "truncated": "prompt_truncated",
    "grown": "prompt_grew",
    "prefix": "prompt_in_output",
    "big_id": "token_out_of_range",
    "no_stop": "stop_token_missing",
    "short": "too_short",
}


@pytest.mark.parametrize("fault", sorted(REJECTS))
async def test_a_fault_that_cannot_heal_rejects_one_record_at_once(
    fault: str, target: Path, tmp_path: Path, fast_retries: None
) -> None:
    manifest, loopback = await run_with(fault, target, tmp_path, only_once=False)
    assert manifest.rejected_by_reason == {REJECTS[fault]: 1}
    assert manifest.counts.done == NUM_PROMPTS - 1
    assert len(loopback.payloads) == NUM_PROMPTS


@pytest.mark.parametrize("fault", ["abort", "wrong_count", "text", "html", "status:500", "reset_during"])
async def test_a_fault_that_never_heals_is_rejected_after_the_last_attempt(
    fault: str, target: Path, tmp_path: Path, fast_retries: None
) -> None:
    manifest, loopback = await run_with(fault, target, tmp_path, only_once=False)
    assert manifest.counts.done == NUM_PROMPTS - 1
    assert manifest.counts.rejected == 1
    assert len(loopback.payloads) == NUM_PROMPTS - 1 + 3


@pytest.mark.parametrize("fault", ["no_text", "replacement", "one_id", "fffd"])
async def test_right_ids_with_an_odd_text_are_data_and_counted(fault: str, target: Path, tmp_path: Path) -> None:
    manifest, _ = await run_with(fault, target, tmp_path, only_once=False)
    assert manifest.counts.done == NUM_PROMPTS
    assert manifest.figures["text_repaired"] == (1 if fault in ("no_text", "replacement") else 0)


@pytest.mark.parametrize("fault", ["never", "drip"])
async def test_a_request_past_its_deadline_is_aborted_by_rid_and_tried_again(
    fault: str, target: Path, tmp_path: Path, fast_retries: None
) -> None:
    manifest, loopback = await run_with(fault, target, tmp_path, only_once=True, server={"deadline_floor_s": 1.0})
    assert manifest.counts.done == NUM_PROMPTS
    assert len(loopback.aborted) == 1


@pytest.mark.parametrize("fault", ["status:401", "redirect"])
async def test_a_wrong_key_or_url_stops_the_run_with_a_message(fault: str, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key_file|server\.urls"):
        await run_with(fault, target, tmp_path, only_once=False)


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
    for payload in loopback.payloads:
        assert len(payload["input_ids"]) + payload["sampling_params"]["max_new_tokens"] < 2048


async def test_many_refusals_stop_the_dataset_at_its_canary(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 300}, generation={"canary": 8})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 100)
    with (
        LoopbackServer(target, behave=lambda payload, nth: "truncated") as loopback,
        pytest.raises(GateError, match="rejected"),
    ):
        await generate(run, config, urls=[loopback.url])
    assert len(loopback.payloads) == 8
