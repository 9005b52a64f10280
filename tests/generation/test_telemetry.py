"""What a session says of itself: a forecast that neither a short outage nor a retry can shake, and fair deadlines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eyas.generation.asking import Asker, Record
from eyas.generation.dataset import DatasetRun
from eyas.generation.forecast import LengthSample
from eyas.generation.inflight import InFlightLog
from eyas.generation.records import Prompt
from eyas.generation.scheduler import Share
from eyas.generation.statistics import LengthStatistics
from eyas.generation.telemetry import Telemetry
from eyas.sglang.client import SGLangClient
from eyas.sglang.config import ServerConfig
from eyas.sglang.pool import USUAL_OUTAGE_S, Server, ServerPool
from eyas.sglang.replies import Reply
from tests.sglang.tiny import load_renderer, tiny_config


def make_pool(*limits: int) -> ServerPool:
    servers = [Server(client=SGLangClient(f"http://127.0.0.1:{number + 1}", ServerConfig())) for number in range(len(limits))]
    for server, limit in zip(servers, limits, strict=True):
        server.set_ceiling(limit)
        server.close_breaker()
    return ServerPool(servers)


def make_reply(num_tokens: int) -> Reply:
    return Reply(
        output_ids=[5] * num_tokens,
        finish_reason="stop",
        prompt_tokens=10,
        cached_tokens=0,
        weight_version="",
        text_match="exact",
        queue_time_s=0.0,
        first_token_s=0.0,
        e2e_s=0.0,
        num_retractions=0,
    )


def make_dataset(num_pending: int, num_flying: int) -> DatasetRun:
    """What telemetry reads of a dataset: 200 replies of about 100 tokens done, some requests just sent."""
    sample = LengthSample(256)
    for number in range(200):
        sample.add(90 + number % 21, number)
    share = Share(name="a", num_pending=num_pending, mean_tokens=100.0, in_flight=num_flying)
    flying = {str(number): (time.monotonic(), 200 + number) for number in range(num_flying)}
    return cast(
        DatasetRun, SimpleNamespace(name="a", sample=sample, share=share, lengths=LengthStatistics(), flying=flying, gates=None)
    )


def measured(pool: ServerPool, folder: Path) -> Telemetry:
    """Telemetry of a server that gave 300 tokens/s to 100 requests for half an hour, 1/3 s a token each."""
    telemetry = Telemetry(pool, folder)
    telemetry.count_reply(make_reply(100), 33.0)
    for minute in range(30):
        telemetry._curve.add(60.0 * minute, 100, 300.0)
    return telemetry


async def forecast_s(telemetry: Telemetry, dataset: DatasetRun) -> float:
    await telemetry.refresh_forecast([dataset])
    assert telemetry.forecast is not None
    return telemetry.forecast.median_s


async def test_a_server_that_is_out_for_a_moment_does_not_shake_the_forecast(tmp_path: Path) -> None:
    """The only server answered nothing for 16 s, and a run of 33 minutes was said to take 17 h: forecast on one request."""
    pool, dataset = make_pool(128), make_dataset(5000, 100)
    telemetry = measured(pool, tmp_path)
    before_s = await forecast_s(telemetry, dataset)
    assert before_s == pytest.approx(5100 * 100 / 300, rel=0.1)
    pool.servers[0].open_breaker("no reply")
    assert pool.capacity == 0
    assert await forecast_s(telemetry, dataset) == pytest.approx(before_s, rel=0.02)


async def test_a_request_between_two_tries_is_still_to_be_done(tmp_path: Path) -> None:
    """Requests that were aborted and wait for their next try were neither in flight nor pending: forgotten."""
    telemetry = measured(make_pool(128), tmp_path)
    before_s = await forecast_s(telemetry, make_dataset(1000, 100))
    waiting = make_dataset(1000, 100)
    waiting.flying.clear()
    assert await forecast_s(telemetry, waiting) == pytest.approx(before_s, rel=0.05)


def test_a_server_counts_until_its_outage_is_no_longer_usual() -> None:
    pool = make_pool(100, 20)
    assert pool.usual_capacity == 120
    pool.servers[0].open_breaker("no reply")
    assert (pool.capacity, pool.usual_capacity) == (20, 120)
    pool.servers[0].out_since -= USUAL_OUTAGE_S + 1
    pool.servers[0].open_breaker("still none")
    assert pool.usual_capacity == 20, "it is lost until it returns"
    pool.servers[1].open_breaker("no reply")
    assert pool.usual_capacity == 120, "with none left the run waits for them"
    pool.servers[0].state = "draining"
    assert pool.usual_capacity == 20


async def test_before_the_first_reply_the_time_left_is_unknown(tmp_path: Path) -> None:
    pool = make_pool(128)
    telemetry = Telemetry(pool, tmp_path)
    pool.servers[0].in_flight = 100
    for counter in (0.0, 500.0, 900.0):  # prompts are being read: this is not the rate of the run
        pool.servers[0].load = {"generation_tokens": counter}
        telemetry.look([], {})
    await telemetry.refresh_forecast([make_dataset(1000, 100)])
    assert telemetry.figures()["remaining_s"] == "unknown"
    telemetry.count_reply(make_reply(100), 33.0)
    pool.servers[0].load = {"generation_tokens": 1500.0}
    telemetry.look([], {})
    await telemetry.refresh_forecast([make_dataset(1000, 100)])
    assert isinstance(telemetry.figures()["remaining_s"], int)


@pytest.mark.parametrize(("token_s", "wanted_s"), [(0.0, 128.0), (0.01, 128.0), (0.5, 384.0)])
async def test_a_deadline_gives_three_times_what_such_a_reply_takes_now(
    token_s: float, wanted_s: float, target: Path, tmp_path: Path
) -> None:
    """At 128 requests on two cores a reply of 256 tokens took 110 s; with 128 s for each, one in thirty was aborted and redone."""
    config = tiny_config(target, {"a": 256}, server={"deadline_floor_s": 120.0, "min_tokens_per_s": 2.0})
    spec, _ = load_renderer(config)
    telemetry, in_flight = Telemetry(make_pool(4), tmp_path), InFlightLog(tmp_path / "in-flight.log")
    in_flight.open()
    if token_s:
        telemetry.count_reply(make_reply(101), 100 * token_s)
    asker = Asker(
        pool=make_pool(4),
        config=config,
        spec=spec,
        sampling={},
        decode=str,
        telemetry=telemetry,
        in_flight=in_flight,
        may_send=asyncio.Event(),
    )
    deadlines: list[float] = []

    async def generate(request: Any, *, deadline_s: float, **_: Any) -> Reply:
        deadlines.append(deadline_s)
        return make_reply(5)

    server = Server(client=cast(SGLangClient, SimpleNamespace(url="http://s", generate=generate)), state="ready")
    prompt = cast(Prompt, SimpleNamespace(id="p", input_ids=[5] * 10, max_new_tokens=256, split="train"))
    await asker._attempt(prompt, Record(start_number=0), server)
    in_flight.close()
    assert deadlines == [pytest.approx(wanted_s)]
