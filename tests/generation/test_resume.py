"""Killed at any point and started again: every id once, and the same bytes as an unbroken run.

- resume by count instead of by id: https://github.com/deepseek-ai/DeepSpec/issues/35
- wanted repeats of one prompt: https://github.com/NousResearch/hermes-agent/issues/86523
- torn tails: https://github.com/Tracer-Cloud/opensre/issues/6356
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError
from eyas.generation.session import GenerationSession, generate
from eyas.workspace import RunFolder
from tests.generation.conftest import journal_entries, tokenized_rows, until
from tests.sglang.loopback import LoopbackServer
from tests.sglang.tiny import tiny_config, write_prompts

DATASETS = {"a": 60, "b": 80}
ROOT = Path(__file__).parents[2]


def start_child(run: RunFolder, config: RunConfig, url: str) -> subprocess.Popen[bytes]:
    path = run.root / "child.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.generation.child", str(run.root), str(path), url]
    with open(run.root / "child.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stderr=log)


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def journal_bytes(run: RunFolder) -> int:
    return sum(path.stat().st_size for path in run.root.glob("responses/*/journal-*.jsonl"))


def results(run: RunFolder) -> dict[str, bytes]:
    return {name: (run.responses(name) / "tokenized_data.jsonl").read_bytes() for name in DATASETS}


async def unbroken(target: Path, root: Path, num_prompts: int) -> tuple[RunConfig, dict[str, bytes], int]:
    """(config, results, journal size) of a run that nothing interrupts."""
    config = tiny_config(target, DATASETS, generation={"proof_prompts": 1})
    run = RunFolder(root).create()
    for name in DATASETS:
        write_prompts(run, config, name, num_prompts)
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url])
    return config, results(run), journal_bytes(run)


@pytest.mark.parametrize("num_kills", [10, pytest.param(200, marks=pytest.mark.soak)])
async def test_a_killed_run_ends_in_the_same_bytes(num_kills: int, target: Path, tmp_path: Path) -> None:
    num_prompts = 40 * num_kills // 10 if num_kills > 10 else 60
    config, expected, total_bytes = await unbroken(target, tmp_path / "unbroken", num_prompts)
    run = RunFolder(tmp_path / "killed").create()
    for name in DATASETS:
        write_prompts(run, config, name, num_prompts)
    rng, num_at_work = random.Random(num_kills), 0
    with LoopbackServer(target, delay_s=0.02, max_running_requests=8) as server:
        for num_left in range(num_kills, 0, -1):
            child, before = start_child(run, config, server.url), journal_bytes(run)
            point = before + rng.uniform(-0.1, 1) * (total_bytes - before) / num_left  # some at its start, most at work
            wait_until(lambda child=child, point=point: child.poll() is not None or journal_bytes(run) >= point)
            child.send_signal(signal.SIGKILL)
            child.wait()
            num_at_work += journal_bytes(run) > before
            tear_tail(run, rng)
        assert start_child(run, config, server.url).wait(120) == 0, (run.root / "child.log").read_text()[-2000:]
    assert results(run) == expected
    assert num_at_work >= 0.6 * num_kills
    for name in DATASETS:
        ids = [entry["id"] for entry in journal_entries(run, name)]
        assert len(ids) == len(set(ids)) == num_prompts


def tear_tail(run: RunFolder, rng: random.Random) -> None:
    """Half of the time a crash also leaves the beginning of a line, cut inside a UTF-8 character, in a journal in use."""
    for path in run.root.glob("responses/*/journal-*.jsonl"):
        if rng.random() < 0.5 and not (path.parent / "manifest.json").exists():
            with open(path, "ab") as file:
                file.write(b'{"id":"7","te' + b"\xe2")


async def test_a_slow_first_prompt_is_neither_lost_nor_repeated(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    first = write_prompts(run, config, "a", 30)[0]["id"]
    with LoopbackServer(target, behave=lambda payload, nth: "never" if first in payload["rid"] else None) as server:
        child = start_child(run, config, server.url)
        wait_until(lambda: len(journal_entries(run, "a")) >= 29)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert {entry["id"] for entry in journal_entries(run, "a")}.isdisjoint({first})
        server.behave = lambda payload, nth: None
        num_before = len(server.payloads)
        await generate(run, config, urls=[server.url])
        assert [payload["rid"].split("-")[1] for payload in server.payloads[num_before:]] == [first]
        left_over = next(payload["rid"] for payload in server.payloads[:num_before] if first in payload["rid"])
        assert left_over in server.aborted, "the killed client's request must be aborted at the next start"


async def test_three_identical_prompts_give_three_replies_across_a_resume(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0}, server={"max_concurrency": 1})
    run = RunFolder(tmp_path).create()
    rows = write_prompts(run, config, "a", 3, are_alike=True)
    assert (len({row["id"] for row in rows}), len({str(row["input_ids"]) for row in rows})) == (3, 1)
    with LoopbackServer(target, behave=lambda payload, nth: "never" if nth > 1 else None) as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url]))
        await until(lambda: len(journal_entries(run, "a")) == 1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        server.behave = lambda payload, nth: None
        await generate(run, config, urls=[server.url])
    assert {row["id"] for row in tokenized_rows(run, "a")} == {row["id"] for row in rows}


async def test_a_second_process_is_refused_with_the_holders_pid(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 4)
    with LoopbackServer(target) as server:
        async with GenerationSession(run, config, urls=[server.url]):
            child = start_child(run, config, server.url)
            assert child.wait(60) != 0
            assert f"in use by process {os.getpid()}" in (run.root / "child.log").read_text()


async def test_a_finished_dataset_sends_nothing_and_gives_the_same_manifest(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 8)
    with LoopbackServer(target) as server:
        first = await generate(run, config, urls=[server.url])
        num_sent = len(server.payloads)
        second = await generate(run, config, urls=[server.url])
        assert len(server.payloads) == num_sent
    assert first == second


async def test_more_prompts_continue_and_another_seed_starts_anew(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    with LoopbackServer(target) as server:
        write_prompts(run, config, "a", 8)
        await generate(run, config, urls=[server.url])
        write_prompts(run, config, "a", 12)
        manifests = await generate(run, config, urls=[server.url])
        assert manifests["a"].counts.done == 12
        assert len(server.payloads) == 12
        reseeded = tiny_config(target, {"a": 60}, generation={"seed": 7})
        await generate(run, reseeded, urls=[server.url])
        assert len(server.payloads) == 24
    assert len(list(run.responses("a").glob("journal-*.jsonl"))) == 2


async def test_a_resumed_record_is_sampled_with_the_same_seed(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    seeds = []
    for name in ("x", "y"):
        run = RunFolder(tmp_path / name).create()
        write_prompts(run, config, "a", 6)
        with LoopbackServer(target) as server:
            await generate(run, config, urls=[server.url])
        seeds.append({payload["rid"].split("-")[1]: payload["sampling_params"]["sampling_seed"] for payload in server.payloads})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 6


async def test_a_server_that_computes_something_else_is_refused_on_resume(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 6)
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url])
        server.shift_logprobs = 0.3
        write_prompts(run, config, "a", 7)
        with pytest.raises(ConfigError, match="not the target that this run began with"):
            await generate(run, config, urls=[server.url])


async def test_a_digit_edited_in_the_journal_is_found_and_its_record_generated_again(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 6)
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url])
        expected = (run.responses("a") / "tokenized_data.jsonl").read_bytes()
        (journal,) = run.responses("a").glob("journal-*.jsonl")
        lines = journal.read_bytes().split(b"\n")
        first, edited = json.loads(lines[2])["output_ids"], json.loads(lines[2])["id"]
        lines[2] = lines[2].replace(b'"output_ids":[%d,' % first[0], b'"output_ids":[%d,' % (first[0] ^ 1))
        journal.write_bytes(b"\n".join(lines))
        (run.responses("a") / "manifest.json").unlink()
        manifest = (await generate(run, config, urls=[server.url]))["a"]
        assert [payload["rid"].split("-")[1] for payload in server.payloads[6:]] == [edited]
    assert manifest.figures["bad_journal_lines"] == 1
    assert (run.responses("a") / "tokenized_data.jsonl").read_bytes() == expected


async def test_a_digit_edited_in_the_prompts_is_refused(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 6)
    path = run.prompts("a") / "prompts.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with LoopbackServer(target) as server:
        with pytest.raises(ArtifactError, match="differs from the digest in its manifest; run phase 'prepare' again"):
            await generate(run, config, urls=[server.url])
        assert server.payloads == []
