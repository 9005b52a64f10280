"""One run at a time on a server: the others wait, even one that a person lets go on after a pause."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prefect import flow

from eyas.config import RunConfig
from flows.benchmark import benchmark
from flows.extract import extract
from flows.generate import generate
from flows.train import train
from flows.turn import turn
from tests.prefect.paper import Paper, config_with
from tests.prefect.test_decision import answer
from tests.prefect.test_pipeline import run_pipeline

ELSEWHERE = {"kind": "sglang", "urls": ["http://10.0.0.7:30000", "http://10.0.0.8:30000"]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr("flows.turn.POLL_S", 0.01)
    monkeypatch.setattr("flows.decide.decide.__kwdefaults__", {"poll_s": 1})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("locks")))


async def side_by_side(*configs: RunConfig) -> list[str]:
    """What two holders did, in order; each looks away twice while it holds."""
    done: list[str] = []

    async def hold(name: str, config: RunConfig) -> None:
        async with turn(config):
            done.append(f"{name} in")
            await asyncio.sleep(0.1)
            done.append(f"{name} out")

    @flow
    async def holders() -> None:
        await asyncio.gather(*(hold(name, config) for name, config in zip("ab", configs, strict=True)))

    await holders()
    return done


async def test_runs_that_share_a_server_take_turns() -> None:
    both = config_with(server=ELSEWHERE)
    one = config_with(server={**ELSEWHERE, "urls": ELSEWHERE["urls"][1:]})
    for order in ((both, one), (one, both), (both, both)):
        done = await side_by_side(*order)
        assert [step[2:] for step in done] == ["in", "out", "in", "out"]


async def test_runs_on_other_servers_or_on_the_embedded_engine_do_not_wait() -> None:
    one, other = (config_with(server={**ELSEWHERE, "urls": [url]}) for url in ELSEWHERE["urls"])
    for order in ((one, other), (config_with(), config_with())):
        assert [step[2:] for step in await side_by_side(*order)] == ["in", "in", "out", "out"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once somebody has said that it waits."""
    event = asyncio.Event()
    monkeypatch.setattr("flows.turn.get_run_logger", lambda: SimpleNamespace(info=lambda *details: event.set()))
    return event


async def test_a_paused_run_let_go_on_waits_for_the_run_that_has_the_servers_now(
    paper: Paper, run: str, waits: asyncio.Event
) -> None:
    paper.holds = {"B1_glaive": asyncio.Event()}
    ask = {"decision": "ask", "decision_timeout_s": 600}
    paused = asyncio.create_task(run_pipeline(run, config_with(server=ELSEWHERE, operate=ask), until="generate"))
    other = asyncio.create_task(run_pipeline(f"{run}-2", config_with(server=ELSEWHERE), until="generate"))
    while not paper.sessions:
        await asyncio.sleep(0.05)
    await answer(run, {"choice": "accept"})
    await asyncio.wait_for(waits.wait(), 240)
    assert paper.sessions == 1
    paper.holds["B1_glaive"].set()
    assert (await other).is_completed()
    assert (await paused).is_completed()
    assert paper.sessions == 2


async def test_a_phase_of_its_own_waits_too(paper: Paper, run: str, waits: asyncio.Event) -> None:
    config = config_with(server=ELSEWHERE)
    await run_pipeline(run, config)
    for phase in (generate, extract, train, benchmark):
        async with turn(config):
            waits.clear()
            task = asyncio.create_task(phase(run=run, return_state=True))
            await asyncio.wait_for(waits.wait(), 240)
        assert (await task).is_completed(), phase.name
