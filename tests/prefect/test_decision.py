"""The decision before generation: by a person through Prefect's API, by the config, or by the default in time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from eyas.operate.decision import Declined
from tests.prefect.paper import Paper, config_with
from tests.prefect.test_pipeline import run_pipeline


def decisions(run: str) -> list[dict[str, str]]:
    return list(json.loads((Path(run) / "plan.json").read_bytes())["decisions"])


async def answer(run: str, values: dict[str, Any]) -> None:
    """Do what the UI's form does, once the run is paused."""
    deadline = time.monotonic() + 240
    async with get_client() as client:
        while time.monotonic() < deadline:
            for flow_run in await client.read_flow_runs():
                if flow_run.parameters.get("run") == run and flow_run.state is not None and flow_run.state.is_paused():
                    await client.resume_flow_run(flow_run.id, run_input=values)
                    return
            await asyncio.sleep(0.1)
    raise AssertionError("the run never paused")


@pytest.fixture(autouse=True)
def quick_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.decide.decide.__kwdefaults__", {"poll_s": 1})


async def test_a_config_that_accepts_is_recorded_and_not_asked(paper: Paper, run: str) -> None:
    await run_pipeline(run, until="generate")
    assert [(item["what"], item["who"]) for item in decisions(run)] == [("accept", "config")]


async def test_a_person_chooses_a_subset_and_it_stands_in_the_next_run(paper: Paper, run: str) -> None:
    config = config_with(operate={"decision": "ask", "decision_timeout_s": 600})
    state, _ = await asyncio.gather(
        run_pipeline(run, config, until="generate"), answer(run, {"choice": "subset", "subset_percent": 25, "note": "first a look"})
    )
    assert state.is_completed(), state
    assert [item["what"] for item in decisions(run)] == ["set prompts.subsample=0.25", "accept"]
    assert decisions(run)[-1]["why"] == "first a look"
    assert paper.made["prepare B1_glaive"] == 2, "prompts are selected again"
    assert (await run_pipeline(run, config, until="generate")).is_completed()
    assert json.loads((Path(run) / "run.json").read_bytes())["config"]["prompts"]["subsample"] == 0.25
    assert paper.made["generate B1_glaive"] == 1


async def test_abort_ends_the_run_before_anything_long(paper: Paper, run: str) -> None:
    config = config_with(operate={"decision": "ask", "decision_timeout_s": 600})
    state, _ = await asyncio.gather(run_pipeline(run, config), answer(run, {"choice": "abort"}))
    assert isinstance(await state.aresult(raise_on_failure=False), Declined)
    assert paper.made["generate B1_glaive"] == 0


@pytest.mark.parametrize(("default", "is_completed"), [("accept", True), ("abort", False)])
async def test_silence_means_the_stated_default(paper: Paper, run: str, default: str, is_completed: bool) -> None:
    config = config_with(operate={"decision": "ask", "decision_timeout_s": 2, "decision_default": default})
    state = await run_pipeline(run, config, until="generate")
    assert state.is_completed() is is_completed
    assert "nobody answered" in decisions(run)[-1]["why"]
    assert decisions(run)[-1]["what"] == default
