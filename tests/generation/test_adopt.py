"""Responses of another script: what meets the rules is kept, the rest stays pending with its reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from eyas.generation.adopt import adopt
from eyas.generation.session import generate
from eyas.progress import Progress
from eyas.workspace import RunFolder
from tests.generation.conftest import tokenized_rows
from tests.sglang.loopback import CLOSE_ID, LoopbackServer
from tests.sglang.tiny import END_ID, FIRST_BYTE_ID, tiny_config, write_prompts

BODY = [FIRST_BYTE_ID + 70 + number % 20 for number in range(30)]


def rows_for(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [prompt["input_ids"] for prompt in prompts]
    good = [*BODY, END_ID]
    return [
        {"input_ids": ids[0], "output_ids": good, "finish_reason": "stop"},
        {"prompt_token_ids": ids[1], "output_ids": good, "meta_info": {"finish_reason": {"type": "stop", "matched": END_ID}}},
        {"input_ids": ids[2], "output_ids": (BODY * 10)[:60], "finish_reason": "length"},
        {"input_ids": ids[0], "output_ids": good, "finish_reason": "stop"},
        {"messages": [{"role": "user", "content": "x"}], "response": "text alone"},
        {"input_ids": ids[3], "output_ids": BODY[:20], "finish_reason": "length"},
        {"input_ids": ids[3], "output_ids": BODY, "finish_reason": "stop"},
        {"input_ids": ids[3], "output_ids": good, "finish_reason": None},
        {"input_ids": [1, *ids[3]], "output_ids": good, "finish_reason": "stop", "id": prompts[3]["id"]},
        {"input_ids": [9, 9], "output_ids": good, "finish_reason": "stop"},
        {"output_ids": good, "finish_reason": "stop"},
        {"input_ids": ids[3], "output_ids": good, "finish_reason": "stop", "meta_info": {"prompt_tokens": len(ids[3]) - 1}},
        {"prompt": "half a pair \ud83e", "output_ids": good, "finish_reason": "stop"},
        {"input_ids": ids[3], "output_ids": good, "finish_reason": "stop", "text": "\ud83e"},
        {"input_ids": ids[3], "output_ids": [1 << 70, END_ID], "finish_reason": "stop"},
        {"input_ids": ids[3], "output_ids": [END_ID] * 24, "finish_reason": "stop"},
        {"input_ids": ids[3], "output_ids": [END_ID, *(BODY * 10)[:59]], "finish_reason": "length"},
    ]


EXPECTED = {
    "already_done": 1,
    "text_only": 1,
    "cut_too_early": 1,
    "unexpected_stop": 1,
    "end_token_inside": 2,
    "unknown_finish": 1,
    "other_template": 1,
    "unknown_prompt": 1,
    "no_prompt_ids": 1,
    "prompt_truncated": 1,
    "not_json": 2,
    "bad_row": 3,
}


async def test_rows_are_kept_or_refused_by_reason_and_only_the_rest_is_generated(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path / "run").create()
    prompts = write_prompts(run, config, "a", 10)
    path = tmp_path / "old.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows_for(prompts)) + b"\nbroken\n" + b"[" * 100_000)
    told: list[Progress] = []
    audit = await asyncio.to_thread(adopt, run, config, "a", [path], told.append)
    assert [(item.stage, item.name, item.done, item.total, item.is_final) for item in told] == [("generate", "a", 3, 10, False)]
    assert dict(audit.refused) == EXPECTED
    assert (audit.rows, audit.kept, audit.cut_by_length) == (19, 3, 1)
    assert audit.examples["text_only"].startswith("old.jsonl:5")
    with LoopbackServer(target) as server:
        manifests = await generate(run, config, urls=[server.url])
    assert {payload["rid"].split("-")[1] for payload in server.payloads} == {prompt["id"] for prompt in prompts[3:]}
    assert manifests["a"].counts.done == 10
    assert tokenized_rows(run, "a")[0]["input_ids"] == prompts[0]["input_ids"] + [*BODY, END_ID]


async def test_replies_that_lost_their_reasoning_are_generated_again(thinking_target: Path, tmp_path: Path) -> None:
    """The reference run saved the answers alone: with ids made of them, everything else about such rows looks right."""
    config = tiny_config(thinking_target, {"a": 60})
    run = RunFolder(tmp_path / "run").create()
    prompts = write_prompts(run, config, "a", 4)
    outputs = [
        [*BODY[:9], CLOSE_ID, *BODY[9:20], END_ID],
        [*BODY, END_ID],  # no reasoning
        [CLOSE_ID, *BODY, END_ID],  # an empty think block
        (BODY * 10)[:60],  # cut inside of its reasoning
    ]
    rows = [
        {"input_ids": prompt["input_ids"], "output_ids": ids, "finish_reason": "stop" if ids[-1] == END_ID else "length"}
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
    path = tmp_path / "old.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows))
    audit = await asyncio.to_thread(adopt, run, config, "a", [path])
    assert (audit.kept, audit.with_reasoning, dict(audit.refused)) == (2, 2, {"no_reasoning": 2})
    assert audit.examples["no_reasoning"].startswith("old.jsonl:2")
    with LoopbackServer(thinking_target) as server:
        await generate(run, config, urls=[server.url])
    assert sorted(payload["rid"].split("-")[1] for payload in server.payloads) == sorted(prompt["id"] for prompt in prompts[1:3])
