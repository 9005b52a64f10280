"""The session against a real HTTP server on loopback: what comes out, and what becomes of faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import pytest

from eyas.errors import ConfigError, TooManyRejects
from eyas.generation.session import generate
from eyas.manifest import verify_manifest
from eyas.progress import Progress
from eyas.workspace import RunFolder
from tests.generation.conftest import journal_entries, tokenized_rows, until
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


async def test_a_template_that_differs_for_one_dataset_stops_all_at_once(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 200, "b": 200})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 12, with_tools=True)
    write_prompts(run, config, "b", 12)
    with LoopbackServer(target, behave=lambda payload, nth: "never") as server:
        server.tokenizer.chat_template = server.tokenizer.chat_template.replace("tojson", "tojson | upper")
        async with asyncio.timeout(240):
            with pytest.raises(ConfigError, match="dataset a"):
                await generate(run, config, urls=[server.url])


async def test_progress_says_counts_lengths_gates_and_the_end(target: Path, tmp_path: Path, fast_ticks: None) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 60)
    messages: list[Progress] = []
    with LoopbackServer(target, delay_s=0.1, max_running_requests=4) as server:
        await generate(run, config, urls=[server.url], report=messages.append)
    assert messages[-1].is_final
    assert messages[-1].done == messages[-1].total == 60
    moving = [message.figures for message in messages if not message.is_final]
    assert {"tokens_median", "tokens_p99", "share_with_reasoning", "gates", "in_flight", "done", "rejected", "pending"} <= moving[
        -1
    ].keys()
    left = [figures.get("remaining_s", "unknown") for figures in moving]
    assert left[0] == "unknown", "no straight line before there is a forecast"
    assert any(not isinstance(seconds, str) and seconds > 0 for seconds in left), "a forecast while it runs"
    assert all(figures["done"] + figures["rejected"] + figures["pending"] == 60 for figures in moving)
    servers = json.loads((run.progress / "servers.json").read_text())["servers"]
    assert servers[0]["url"] == server.url


@pytest.mark.parametrize("token", [-2, 261, 10_000])
async def test_a_stop_token_that_the_tokenizer_does_not_know_is_refused(token: int, target: Path, tmp_path: Path) -> None:
    """The model's vocabulary may be padded beyond the tokenizer's; no reply stops at a row that stands for no token."""
    padded = tmp_path / "padded"
    shutil.copytree(target, padded)
    raw = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps(raw | {"vocab_size": 320}))
    config = tiny_config(padded, {"a": 60}, generation={"sampling": {"stop_token_ids": [2, token]}})
    with LoopbackServer(padded) as server, pytest.raises(ConfigError, match=f"holds {token}, the tokenizer of"):
        await generate(RunFolder(tmp_path / "run").create(), config, urls=[server.url])
    assert server.payloads == []


async def test_too_many_rejects_finish_the_dataset_and_say_so(target: Path, tmp_path: Path) -> None:
    gates = {"rejected": {"warn": 1.0, "stop": 1.0}}
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "gates": gates, "reject_limit": 0.2})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 20)
    for _ in range(2):
        with (
            LoopbackServer(target, behave=lambda payload, nth: "truncated" if nth % 2 else None) as server,
            pytest.raises(TooManyRejects, match="prompt_truncated"),
        ):
            await generate(run, config, urls=[server.url])
    manifest = verify_manifest(run.responses("a"))
    assert manifest.counts.pending == 0
    assert manifest.counts.rejected == 10
    rejects = (run.responses("a") / "rejects.jsonl").read_bytes().split(b"\n")[:-1]
    assert len(rejects) == 10
    assert {json.loads(line)["reason"] for line in rejects} == {"prompt_truncated"}


def fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


async def test_a_disk_that_fills_up_pauses_the_run_until_there_is_space(small_disk: Path, target: Path, fast_ticks: None) -> None:
    """https://github.com/atlanhq/application-sdk/pull/3188, on a real full file system: nothing is lost, nothing is sent twice."""
    config = tiny_config(target, {"a": 300}, generation={"canary": 0})
    run, ballast = RunFolder(small_disk / "run").create(), small_disk / "ballast"
    write_prompts(run, config, "a", 60)
    messages: list[Progress] = []
    with LoopbackServer(target, delay_s=0.02, max_running_requests=4) as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url], report=messages.append))
        await until(lambda: len(journal_entries(run, "a")) >= 5)
        fill(ballast)
        await until(lambda: "No space left" in str(messages[-1].figures.get("paused", "")))
        await until(lambda: not server.running)
        num_sent = len(server.payloads)
        await asyncio.sleep(0.4)
        assert len(server.payloads) == num_sent < 60
        assert not work.done()
        ballast.unlink()
        manifest = (await work)["a"]
    assert (manifest.counts.done, manifest.counts.rejected) == (60, 0)
    assert len(server.payloads) == len({payload["rid"].split("-")[1] for payload in server.payloads}) == 60
