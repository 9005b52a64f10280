"""The session against a real HTTP server on loopback: what comes out, and what becomes of faults."""

from __future__ import annotations

from pathlib import Path

from eyas.generation.session import generate
from eyas.manifest import verify_manifest
from eyas.workspace import RunFolder
from tests.generation.conftest import tokenized_rows
from tests.sglang.loopback import LoopbackServer
from tests.sglang.tiny import tiny_config, write_prompts


async def test_every_prompt_becomes_one_row_in_the_order_of_the_prompts(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 200, "b": 200})
    run = RunFolder(tmp_path).create()
    prompts = {name: write_prompts(run, config, name, 60, with_tools=True) for name in ("a", "b")}
    with LoopbackServer(target) as server:
        manifests = await generate(run, config, urls=[server.url])
    for name, rows in prompts.items():
        found = tokenized_rows(run, name)
        assert [row["id"] for row in found] == [row["id"] for row in rows]
        for row, prompt in zip(found, rows, strict=True):
            expected, finish = server.answer(prompt["input_ids"], 200)
            assert row["input_ids"] == prompt["input_ids"] + expected
            assert row["loss_mask"] == [0] * len(prompt["input_ids"]) + [1] * len(expected)
            assert row["finish_reason"] == finish
            assert row["split"] == prompt["split"]
        assert manifests[name].counts.done == 60
        verify_manifest(run.responses(name))
