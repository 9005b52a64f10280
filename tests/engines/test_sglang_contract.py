"""Phases 1 and 2 against real SGLang: the contract that the embedded engine and the fake servers imitate."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.generation.session import generate
from eyas.prompts.prepare import prepare
from eyas.sglang.client import DeadlineExceeded, RequestRefused, SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.sglang.identity import take_fingerprint
from eyas.sglang.replies import AbortedReply, GenerateRequest, accept
from eyas.target.config import TargetConfig
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder
from tests.engines.conftest import sglang_server

pytestmark = pytest.mark.engines

KEY = "a key of the tests"
CONFIG = ServerConfig(kind="sglang", urls=["http://127.0.0.1:1"])
TASKS = [
    "Name three rivers.",
    "Write a haiku about rain.",
    "What is 17 + 25?",
    "Explain what a hash table is.",
    "Say hello in French.",
]


@pytest.fixture(scope="module")
def url(sglang_python: Path, logs: Path, target: TargetSpec) -> Iterator[str]:
    with sglang_server(sglang_python, logs / "sglang.log", target.folder, "--api-key", KEY) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[SGLangClient]:
    async with SGLangClient(url, CONFIG, api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def renderer(target: TargetSpec) -> Renderer:
    return Renderer(target, load_tokenizer(target), TargetConfig())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_a_small_run_is_generated_whole_and_never_twice(url: str, tmp_path: Path, target: TargetSpec, renderer: Renderer) -> None:
    (tmp_path / "key").write_text(KEY)
    for name, suffix in (("b1", "Be brief."), ("b2", "Answer in one sentence.")):
        lines = [json.dumps({"conversations": [{"from": "human", "value": f"{task} {suffix}"}]}) for task in TASKS]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    datasets = [{"name": name, "source": f"file:{tmp_path / name}.jsonl", "max_new_tokens": 48} for name in ("b1", "b2")]
    config = RunConfig.model_validate(
        {
            "target": {"context_length": 2048},
            "prompts": {"datasets": datasets, "near_duplicates": False, "decontaminate_against": []},
            "server": {"kind": "sglang", "urls": [url], "api_key_file": str(tmp_path / "key")},
        }
    )
    run = RunFolder(tmp_path / "run").create()
    prepare(run, config)
    manifests = asyncio.run(generate(run, config, urls=[url], api_key=KEY))
    assert {name: manifest.counts.done for name, manifest in manifests.items()} == {"b1": 5, "b2": 5}
    for name, manifest in manifests.items():
        assert (manifest.counts.rejected, manifest.counts.pending) == (0, 0)
        for row in rows_of(run.responses(name) / "tokenized_data.jsonl"):
            prompt = row["input_ids"][: row["prompt_tokens"]]
            assert renderer.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
            assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(row["input_ids"]) - len(prompt))
            assert (row["input_ids"][-1] in target.eos_token_ids) == (row["finish_reason"] == "stop")
    journals = {path: path.read_bytes() for path in (tmp_path / "run" / "responses").rglob("journal-*.jsonl")}
    again = asyncio.run(generate(run, config, urls=[url], api_key=KEY))
    assert {name: manifest.digest() for name, manifest in again.items()} == {
        name: manifest.digest() for name, manifest in manifests.items()
    }
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "responses").rglob("journal-*.jsonl")} == journals


async def test_server_renders_as_we_do(client: SGLangClient, renderer: Renderer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zwölf 漢字?"}]
    assert await client.render(messages, [], {}) == renderer.render(messages).input_ids


async def test_fingerprint_of_the_target_repeats(client: SGLangClient, renderer: Renderer) -> None:
    first, second = await take_fingerprint(client, renderer), await take_fingerprint(client, renderer)
    assert first.differences(second) == []


async def test_wrong_key_is_a_configuration_error(url: str) -> None:
    async with SGLangClient(url, CONFIG, api_key="another") as client:
        with pytest.raises(ConfigError):
            await client.models()


async def test_what_does_not_fit_the_context_is_refused_once(client: SGLangClient) -> None:
    """https://github.com/sgl-project/sglang/pull/2876: prompt + max_new_tokens above the context."""
    payload = {"rid": "too-long", "input_ids": [504] * 2000, "sampling_params": {"max_new_tokens": 100}}
    with pytest.raises(RequestRefused, match="context length"):
        await client.generate_raw(payload, rid="too-long", deadline_s=60)


async def test_unknown_sampling_key_is_refused(client: SGLangClient) -> None:
    payload = {"rid": "unknown", "input_ids": [504, 505], "sampling_params": {"max_tokens": 4}}
    with pytest.raises(RequestRefused, match="max_tokens"):
        await client.generate_raw(payload, rid="unknown", deadline_s=60)


def endless(rid: str) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=[504, 505], sampling_params={"max_new_tokens": 1500, "ignore_eos": True})


async def until_running(client: SGLangClient, wanted: int) -> None:
    deadline = time.monotonic() + 60
    while (running := (await client.loads())["running"]) != wanted:
        assert time.monotonic() < deadline, f"{running} requests are running, wanted {wanted}"
        await asyncio.sleep(0.05)


async def test_aborted_request_comes_back_with_200_and_is_no_data(client: SGLangClient, renderer: Renderer) -> None:
    """https://github.com/sgl-project/sglang/pull/2956"""
    request = endless("to-abort")
    pending = asyncio.create_task(client.generate_raw(request.body(), rid=request.rid, deadline_s=120))
    await until_running(client, 1)
    await client.abort(request.rid)
    with pytest.raises(AbortedReply):
        accept(await pending, request, decode=renderer.tokenizer.decode, vocab_size=renderer.spec.vocab_size, where="test")


async def test_request_past_its_deadline_is_aborted_on_the_server(client: SGLangClient) -> None:
    request = endless("too-slow")
    with pytest.raises(DeadlineExceeded):
        await client.generate_raw(request.body(), rid=request.rid, deadline_s=2)
    await until_running(client, 0)
