"""The fingerprint tells the same target from another, ties aside; identity is checked before the first prompt."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.errors import ConfigError, ServerError
from eyas.generation.proof import prove_rendering
from eyas.prompts.prepare import prepare
from eyas.sglang.client import SGLangClient
from eyas.sglang.identity import FingerprintEntry, TargetFingerprint, check_served_model, take_fingerprint
from eyas.workspace import RunFolder
from tests.sglang.loopback import LoopbackServer
from tests.sglang.recordings import RENDERED
from tests.sglang.tiny import build_target, load_renderer, tiny_config, write_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "tiny")


def made_up(ids: list[int], logprobs: list[float], seconds: list[float], noise: float = 0.01) -> TargetFingerprint:
    entry = FingerprintEntry(output_ids=ids, logprobs=logprobs, second_logprobs=seconds)
    return TargetFingerprint(prompts_digest="d", entries=[entry], noise=noise, weight_version="")


BASE = made_up([5, 6, 7], [-0.1, -0.7, -0.2], [-4.0, -0.72, -5.0])


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (made_up([5, 6, 7], [-0.11, -0.7, -0.2], [-4.0, -0.72, -5.0]), False),
        (made_up([5, 9, 1], [-0.1, -0.71, -3.0], [-4.0, -0.72, -5.0]), False),
        (made_up([8, 6, 7], [-0.1, -0.7, -0.2], [-4.0, -0.72, -5.0]), True),
        (made_up([5, 6, 7], [-0.1, -0.7, -0.9], [-4.0, -0.72, -5.0]), True),
        (made_up([5, 6, 7], [-0.1, -0.7, -0.9], [-4.0, -0.72, -5.0], noise=0.3), False),
        (made_up([5, 6, 7], [], []), False),
    ],
)
def test_a_difference_beyond_the_noise_is_another_target(other: TargetFingerprint, differs: bool) -> None:
    assert bool(BASE.differences(other)) is differs


async def test_a_fingerprint_of_the_same_server_agrees_and_costs_only_its_prompts(target: Path) -> None:
    config = tiny_config(target, {"a": 10})
    _, renderer = load_renderer(config)
    with LoopbackServer(target) as server:
        async with SGLangClient(server.url, config.server) as client:
            one, two = await take_fingerprint(client, renderer), await take_fingerprint(client, renderer)
        assert server.num_probes == 64
    assert one.differences(two) == []
    assert one.noise == 0.0


async def test_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 10})
    spec, renderer = load_renderer(config)
    with LoopbackServer(target) as server:
        server.tokenizer.add_tokens(["def"])
        async with SGLangClient(server.url, config.server) as client:
            with pytest.raises(ConfigError, match="tokenizes a probe"):
                await check_served_model(client, config.server, spec, renderer)


async def test_something_that_is_no_sglang_server_is_said_so(target: Path) -> None:
    config = tiny_config(target, {"a": 10})
    async with SGLangClient("http://127.0.0.1:9", config.server) as client:
        with pytest.raises(ServerError, match="no connection"):
            await client.models()


async def test_another_template_is_found_by_the_render_proof(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 10})
    _, renderer = load_renderer(config)
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 12, with_tools=True)
    path = run.prompts("a") / "prompts.parquet"
    with LoopbackServer(target) as server:
        async with SGLangClient(server.url, config.server) as client:
            assert await prove_rendering(client, renderer, "a", path, 4) == 4
            server.tokenizer.chat_template = server.tokenizer.chat_template.replace("tojson", "tojson | upper")
            with pytest.raises(ConfigError, match=r"dataset a: .* renders a prompt with tools"):
                await prove_rendering(client, renderer, "a", path, 4)


async def test_an_empty_prompt_is_never_sent(target: Path) -> None:
    config = tiny_config(target, {"a": 10})
    with LoopbackServer(target) as server:
        async with SGLangClient(server.url, config.server) as client:
            with pytest.raises(ConfigError, match="empty prompt"):
                await client.generate_raw({"input_ids": []}, rid="x", deadline_s=1.0)
        assert server.payloads == []


def _answers(body: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            pass

    return Handler


@pytest.mark.parametrize("is_changed", [False, True])
async def test_the_render_proof_holds_against_what_a_real_server_sent(tmp_path: Path, is_changed: bool) -> None:
    """SmolLM2's template puts a system turn of its own before a conversation that has none; phase 1's prompt has it, too."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi"}\n')
    prompts = {"datasets": [{"name": "a", "source": f"file:{rows}"}], "decontaminate_against": []}
    config = RunConfig.model_validate({"prompts": prompts})
    run = RunFolder(tmp_path / "run")
    prepare(run, config)
    _, renderer = load_renderer(config)
    body = RENDERED.replace("6004", "6005") if is_changed else RENDERED
    with ThreadingHTTPServer(("127.0.0.1", 0), _answers(body.encode())) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with SGLangClient(f"http://127.0.0.1:{server.server_port}", config.server) as client:
            proof = prove_rendering(client, renderer, "a", run.prompts("a") / "prompts.parquet", 4)
            if is_changed:
                with pytest.raises(ConfigError, match="differ from position 24"):
                    await proof
            else:
                assert await proof == 1
        server.shutdown()
