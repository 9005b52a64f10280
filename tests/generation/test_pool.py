"""Servers that die, return, join, drain and queue, while a session runs on them.

- silent total timeouts of clients: https://github.com/BerriAI/litellm/pull/25654, https://github.com/scitix/sieval/pull/112
- idle sockets dropped by the server: https://github.com/NVIDIA-NeMo/Gym/pull/1555
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.errors import ConfigError, ServerError
from eyas.generation import asking
from eyas.generation.control import Control, write_control
from eyas.generation.session import GenerationSession, generate
from eyas.sglang.client import ADMIN_TIMEOUT_S, SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.sglang.health import PoolMonitor
from eyas.sglang.pool import Server, ServerPool
from eyas.workspace import RunFolder
from tests.generation.conftest import journal_entries, tokenized_rows, until
from tests.sglang.loopback import LoopbackServer
from tests.sglang.tiny import tiny_config, write_prompts


async def test_losing_every_server_pauses_the_run_and_fails_no_record(
    target: Path, tmp_path: Path, fast_retries: None, fast_ticks: None
) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "max_attempts": 2})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 60)
    first = LoopbackServer(target, delay_s=0.05, max_running_requests=4)
    with first:
        work = asyncio.create_task(generate(run, config, urls=[first.url]))
        await until(lambda: len(journal_entries(run, "a")) >= 10)
        await asyncio.to_thread(first.stop)
        num_before = len(journal_entries(run, "a"))
        await asyncio.sleep(0.5)
        assert len(journal_entries(run, "a")) <= num_before + 4
        assert not work.done()
        with LoopbackServer(target, max_running_requests=4, port=first.port):
            manifests = await work
    assert manifests["a"].counts.done == 60
    assert manifests["a"].counts.rejected == 0


async def test_an_outage_past_its_limit_fails_resumably(target: Path, tmp_path: Path, fast_retries: None, fast_ticks: None) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0}, server={"outage_limit_s": 0.5})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 30)
    with LoopbackServer(target, delay_s=0.05, max_running_requests=2) as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url]))
        await until(lambda: len(journal_entries(run, "a")) >= 4)
        await asyncio.to_thread(server.stop)
        with pytest.raises(ServerError, match="run the same command again"):
            await work
    with LoopbackServer(target) as server:
        manifests = await generate(run, config, urls=[server.url])
    assert manifests["a"].counts.done == 30


async def test_no_server_at_the_start_is_said_at_once(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    with pytest.raises(ServerError, match="no server answers"):
        await generate(RunFolder(tmp_path).create(), config, urls=["http://127.0.0.1:9"])


async def test_one_of_two_servers_dies_and_the_other_does_the_rest(
    target: Path, tmp_path: Path, fast_retries: None, fast_ticks: None
) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 80)
    options: dict[str, Any] = {"delay_s": 0.03, "max_running_requests": 4}
    with LoopbackServer(target, **options) as one, LoopbackServer(target, **options) as two:
        work = asyncio.create_task(generate(run, config, urls=[one.url, two.url]))
        await until(lambda: min(len(one.payloads), len(two.payloads)) >= 5)
        await asyncio.to_thread(one.stop)
        manifests = await work
    assert manifests["a"].counts.done == 80
    assert {entry["server"] for entry in journal_entries(run, "a")} == {one.url, two.url}


async def test_a_server_that_answers_with_other_weights_spoils_no_record(
    target: Path, tmp_path: Path, fast_retries: None, fast_ticks: None
) -> None:
    """It never went down: only its replies and `/model_info` tell."""
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "max_attempts": 1}, server={"poll_interval_s": 0.2})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 80)
    options: dict[str, Any] = {"delay_s": 0.03, "max_running_requests": 4}
    with LoopbackServer(target, **options) as good, LoopbackServer(target, **options) as turns:
        work = asyncio.create_task(generate(run, config, urls=[good.url, turns.url]))
        await until(lambda: min(len(good.payloads), len(turns.payloads)) >= 5)
        turns.salt, turns.weight_version = b"other", "v2"
        manifests = await work
    assert manifests["a"].counts.done == 80
    entries = journal_entries(run, "a")
    assert {entry["weight_version"] for entry in entries} == {"default"}
    prompts = {payload["rid"].split("-")[1]: payload["input_ids"] for payload in [*good.payloads, *turns.payloads]}
    assert all(entry["output_ids"] == good.answer(prompts[entry["id"]], 60)[0] for entry in entries)


async def test_new_weights_that_compute_the_same_are_proven_and_taken_up(
    target: Path, tmp_path: Path, fast_retries: None, fast_ticks: None
) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "max_attempts": 1}, server={"poll_interval_s": 0.2})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 60)
    with LoopbackServer(target, delay_s=0.03, max_running_requests=4) as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url]))
        await until(lambda: len(server.payloads) >= 5)
        num_probes, server.weight_version = server.num_probes, "v2"
        manifests = await work
        assert server.num_probes >= num_probes + 16, "it was taken back without the fingerprint"
    assert manifests["a"].counts.done == 60
    assert {entry["weight_version"] for entry in journal_entries(run, "a")} == {"default", "v2"}


@pytest.mark.parametrize("sign", ["model_path", "restart"])
async def test_what_the_monitor_sees_takes_a_changed_server_out_until_it_is_proven(target: Path, sign: str) -> None:
    """Weights that call themselves `default`, as SGLang's do unless told otherwise: the name or the counters tell."""
    proven: list[str] = []

    async def admit(server: Server) -> None:
        proven.append(server.url)
        raise ConfigError("another target")

    with LoopbackServer(target) as loopback:
        async with SGLangClient(loopback.url, ServerConfig()) as client:
            server = Server(client=client, state="ready", weight_version="default", model_path=str(target))
            pool = ServerPool([server])
            monitor = PoolMonitor(pool, [1, 2], interval_s=1.0)
            monitor.admit = admit
            await monitor.poll()
            assert (server.state, proven) == ("ready", [])
            if sign == "model_path":
                loopback.model_path = "/models/other"
            else:
                server.load = {"generation_tokens": 1000.0}
            await monitor.poll()
            assert server.state == "open"
            await monitor.poll()
            assert proven == [server.url]
            await pool.report_success(server)
            assert server.room == 0, "a reply that was on its way brought an unproven server back"


async def test_a_server_joins_and_another_is_drained_while_it_runs(target: Path, tmp_path: Path, fast_ticks: None) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 120)
    options: dict[str, Any] = {"delay_s": 0.05, "max_running_requests": 2}
    with LoopbackServer(target, **options) as one, LoopbackServer(target, **options) as two:
        work = asyncio.create_task(generate(run, config, urls=[one.url]))
        await until(lambda: len(one.payloads) >= 4)
        write_control(run.root, Control(add_urls=[two.url], drain_urls=[one.url]))
        await until(lambda: len(two.payloads) >= 4)
        await until(lambda: not one.running)
        num_sent = len(one.payloads)
        manifests = await work
        assert len(one.payloads) == num_sent
    assert manifests["a"].counts.done == 120


async def test_pause_and_resume_by_the_operator(target: Path, tmp_path: Path, fast_ticks: None) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 60)
    with LoopbackServer(target, delay_s=0.02, max_running_requests=2) as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url]))
        await until(lambda: len(server.payloads) >= 4)
        write_control(run.root, Control(paused=True))
        await until(lambda: not server.running)
        await asyncio.sleep(0.3)
        assert not server.running
        assert not work.done()
        write_control(run.root, Control())
        assert (await work)["a"].counts.done == 60
    events = (run.progress / "events.jsonl").read_text()
    assert '"kind":"paused"' in events


async def test_leaving_the_session_aborts_what_is_on_the_server(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 10)
    with LoopbackServer(target, behave=lambda payload, nth: "never") as server:
        work = asyncio.create_task(generate(run, config, urls=[server.url]))
        await until(lambda: len(server.running) == 10)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert {payload["rid"] for payload in server.payloads} == set(server.aborted)


async def test_a_reply_after_the_default_timeouts_of_clients_arrives_as_one_request(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "proof_prompts": 0})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 2)
    with LoopbackServer(target) as server:
        async with GenerationSession(run, config, urls=[server.url]) as session:
            server.delay_s = 5.5  # httpx gives up after 5 s unless told otherwise
            await session.generate_dataset("a")
        assert len(server.payloads) == 2


async def test_every_request_declares_its_own_timeouts_whatever_httpx_would_take(target: Path, tmp_path: Path) -> None:
    """https://github.com/scitix/sieval/pull/112: two libraries' defaults were 120 times apart, and nobody had chosen either."""
    sent: dict[str, dict[str, float | None]] = {}

    async def note(request: httpx.Request) -> None:
        sent[request.url.path] = request.extensions["timeout"]

    with LoopbackServer(target) as server:
        async with SGLangClient(server.url, ServerConfig(connect_timeout_s=7.5)) as client:
            client._http.event_hooks = {"request": [note]}
            payload = {"rid": "r", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
            await client.generate_raw(payload, rid="r", deadline_s=3_600.0)
            await client.abort("r")
    assert sent["/generate"] == {"connect": 7.5, "read": 3_600.0, "write": ADMIN_TIMEOUT_S, "pool": 3_600.0}
    assert sent["/abort_request"] == dict.fromkeys(("connect", "read", "write", "pool"), 5.0), "short on purpose: it may be dead"


async def test_an_idle_connection_is_dropped_before_the_server_drops_it(target: Path) -> None:
    """https://github.com/NVIDIA-NeMo/Gym/pull/1555: uvicorn closes idle sockets after 5 s."""
    assert ServerConfig().keepalive_s < 5
    payload = {"rid": "r", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    for keepalive_s, wanted in ((3600.0, 1), (0.05, 2)):
        with LoopbackServer(target) as server:
            async with SGLangClient(server.url, ServerConfig(keepalive_s=keepalive_s)) as client:
                await client.generate_raw(payload, rid="r", deadline_s=60.0)
                await asyncio.sleep(0.1)
                await client.generate_raw(payload, rid="r", deadline_s=60.0)
            assert server.num_connections == wanted


async def test_a_dropped_socket_is_asked_again_at_once_and_held_against_nobody(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/NVIDIA-NeMo/Gym/pull/1555: several at a time are no sign of a server that is out."""
    monkeypatch.setattr(asking, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(asking, "RETRY_LAST_S", 1000.0)
    config = tiny_config(target, {"a": 60}, generation={"canary": 0, "max_attempts": 1})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 8)
    with LoopbackServer(target, behave=lambda payload, nth: "close_before" if "-1-" in payload["rid"] else None) as server:
        async with asyncio.timeout(240):
            manifests = await generate(run, config, urls=[server.url])
    assert (manifests["a"].counts.done, len(server.payloads)) == (8, 16)
    assert "server out" not in caplog.text


async def test_retry_after_is_honoured(target: Path, tmp_path: Path, fast_retries: None) -> None:
    times: list[float] = []

    def behave(payload: dict[str, Any], nth: int) -> str | None:
        times.append(time.monotonic())
        return "status:503:1" if len(times) == 1 else None

    config = tiny_config(target, {"a": 60}, generation={"canary": 0}, server={"max_concurrency": 1})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 2)
    with LoopbackServer(target, behave=behave) as server:
        await generate(run, config, urls=[server.url])
    assert times[1] - times[0] >= 0.95


def quotes_the_prompt(payload: dict[str, Any], nth: int) -> str | None:
    return "echo" if nth % 2 else None


async def test_the_key_is_sent_and_reaches_no_log_and_no_file(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fast_retries: None
) -> None:
    caplog.set_level(logging.DEBUG)
    config = tiny_config(target, {"a": 60}, generation={"max_attempts": 20})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 5)
    with LoopbackServer(target, api_key="s3cret-key", behave=quotes_the_prompt) as server:
        with pytest.raises(ConfigError, match="api_key_file"):
            await generate(run, config, urls=[server.url], api_key="wr0ng-key")
        await generate(run, config, urls=[server.url], api_key="s3cret-key")
    logged = "\n".join(record.getMessage() for record in caplog.records)
    files = b"".join(path.read_bytes() for path in run.root.rglob("*") if path.is_file() and "prompts" not in path.parts)
    for secret in ("s3cret-key", "wr0ng-key"):
        assert secret not in logged
        assert secret.encode() not in files
    assert "answers 500" in logged
    assert "a prompt of" not in logged, "the server's words reached the log"
    assert "question 1: what" not in logged
    assert not any(entry["id"] in logged and str(entry["output_ids"])[1:20] in logged for entry in journal_entries(run, "a"))


def make_pool(count: int, limit: int = 4) -> ServerPool:
    servers = [
        Server(client=SGLangClient(f"http://127.0.0.1:{port}", ServerConfig()), state="ready") for port in range(1, count + 1)
    ]
    for server in servers:
        server.set_ceiling(limit)
    return ServerPool(servers)


async def test_prompts_that_begin_alike_go_to_one_server_while_it_has_room() -> None:
    pool = make_pool(4, limit=10)
    prefix = list(range(128))
    chosen = {(await pool.lease([*prefix, number])).url for number in range(10)}
    assert len(chosen) == 1
    assert (await pool.lease([*prefix, 99])).url not in chosen, "full: the next goes elsewhere"


async def test_a_lost_server_moves_only_its_own_prefixes() -> None:
    pool = make_pool(4, limit=1000)
    prompts = [[number] * 40 for number in range(100)]
    before = [(await pool.lease(prompt)).url for prompt in prompts]
    lost = pool.servers[0]
    lost.state = "open"
    after = [(await pool.lease(prompt)).url for prompt in prompts]
    assert all(was == now or was == lost.url for was, now in zip(before, after, strict=True))
    assert len(set(after)) == 3


async def test_a_limit_follows_queueing_and_retractions() -> None:
    server = make_pool(1, limit=64).servers[0]
    server.in_flight = 64
    server.adapt({"waiting": 20.0}, 0)
    assert server.limit == 46
    server.adapt({"waiting": 0.0}, 3)
    assert server.limit == 36
    for _ in range(50):
        server.in_flight = server.limit
        server.adapt({"waiting": 0.0}, 0)
    assert server.limit == 64, "it grows back to the server's own limit and no further"


async def test_rows_carry_where_they_came_from(target: Path, tmp_path: Path) -> None:
    config = tiny_config(target, {"a": 60})
    run = RunFolder(tmp_path).create()
    write_prompts(run, config, "a", 5)
    with LoopbackServer(target) as server:
        await generate(run, config, urls=[server.url])
        sent = {payload["rid"]: payload for payload in server.payloads}
    splits = {row["id"]: row["split"] for row in tokenized_rows(run, "a")}
    for entry in journal_entries(run, "a"):
        assert entry["server"] == server.url
        assert entry["attempt"] == 1
        assert entry["weight_version"] == "default"
        assert entry["started_at"] <= entry["finished_at"]
        sampling = sent[entry["rid"]]["sampling_params"]
        assert sampling["sampling_seed"] == entry["seed"]
        assert {
            key: sampling[key] for key in ("temperature", "top_p", "stop_token_ids", "skip_special_tokens", "no_stop_trim")
        } == {
            "temperature": 0.0 if splits[entry["id"]] == "heldout" else 0.6,
            "top_p": 0.9,
            "stop_token_ids": [2],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
    assert len(tokenized_rows(run, "a")) == 5
