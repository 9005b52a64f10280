"""One flow per phase, each from what an earlier run left, gated by its manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import Flow

from deployments.catalogue import HOST_QUEUE, LIGHT_QUEUE, catalogue
from eyas.errors import ArtifactError, ConfigError, EyasError
from flows.benchmark import benchmark
from flows.extract import extract
from flows.generate import generate
from flows.merge import merge
from flows.prepare import prepare
from flows.train import train
from tests.prefect.paper import Paper
from tests.prefect.test_pipeline import ALL_MADE, run_pipeline

FLOWS: list[Flow[..., Any]] = [prepare, generate, merge, extract, train, benchmark]


async def test_the_phases_one_by_one_make_what_the_pipeline_makes(paper: Paper, run: str) -> None:
    await run_pipeline(run, until="prepare")
    for flow in FLOWS:
        state = await flow(run=run, return_state=True)
        assert state.is_completed(), (flow.name, state)
    assert set(paper.made) == ALL_MADE
    assert set(paper.made.values()) == {1}


@pytest.mark.parametrize("flow", FLOWS[1:], ids=lambda flow: flow.name)
async def test_a_phase_without_its_inputs_is_refused_and_starts_nothing(paper: Paper, run: str, flow: Flow[..., Any]) -> None:
    await run_pipeline(run, until="prepare")
    for path in Path(run).glob("prompts/*/manifest.json"):
        path.unlink()
    made = dict(paper.made)
    failure = await (await flow(run=run, return_state=True)).aresult(raise_on_failure=False)
    assert isinstance(failure, (ArtifactError, ConfigError))
    assert paper.made == made


async def test_settings_change_the_recorded_config_for_this_phase_and_after(paper: Paper, run: str) -> None:
    await run_pipeline(run)
    assert (await merge(run=run, settings=["merging.seed=7"], return_state=True)).is_completed()
    assert paper.made["merge"] == 2
    assert '"seed": 7' in (Path(run) / "run.json").read_text()


@pytest.mark.parametrize(("settings", "reason"), [(["merging.sead=7"], "merging.sead"), (["merging.seed"], "key=value")])
async def test_a_wrong_setting_is_refused_with_its_name(paper: Paper, run: str, settings: list[str], reason: str) -> None:
    await run_pipeline(run, until="prepare")
    failure = await (await merge(run=run, settings=settings, return_state=True)).aresult(raise_on_failure=False)
    assert isinstance(failure, EyasError)
    assert reason in str(failure)


def test_every_phase_and_schedule_has_its_deployment_and_the_host_one_run_at_a_time() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert {f"{number}-{flow.name}-only" for number, flow in enumerate(FLOWS, start=1)} <= entries.keys()
    assert {"kimi-k2.5-blackwell", "qwen3-8b-one-gpu", "local-smollm2-quick"} <= entries.keys()
    assert entries["benchmark-nightly"].schedule is not None
    assert not entries["benchmark-nightly"].is_active, "it needs a server to be named first"
    assert entries["watch-every-5-minutes"].is_active
    light = {name for name, entry in entries.items() if entry.queue == LIGHT_QUEUE}
    assert light == {"1-prepare-only", "3-merge-only", "watch-every-5-minutes"}
    assert all(entry.queue == HOST_QUEUE for name, entry in entries.items() if name not in light)
