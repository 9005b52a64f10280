"""The decision before generation: by a person through Prefect's API, by the config, or by the default in time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from eyas.config import PromptsConfig, RunConfig
from eyas.operate.decision import Declined
from flows.decide import half_cap, question
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


async def test_the_question_fits_the_dialogue_and_names_each_alternatives_cost_and_choice(paper: Paper, run: str) -> None:
    """What Prefect's dialogue (470 pixels) was seen to do with a table: cut off every column that says a cost."""
    rows = [
        {"name": "all prompts", "set": "", "hours": 57.0, "disk_bytes": 12e12, "gpu_hours": 456.0, "prompts": 88_088},
        {"name": "25% of every dataset", "set": "prompts.subsample=0.125", "hours": 15.0, "disk_bytes": 3e12, "prompts": 22_022},
        {"name": "replies capped at half", "set": "generation.max_new_tokens=8192", "hours": 40.0, "disk_bytes": None},
        {"name": "more servers", "set": "server.urls", "hours": None, "disk_bytes": 12e12, "accept_length": [2.1, 2.0, 2.2]},
    ]
    phase = {"priority": 1, "title": "Generate responses", "forecast": {"hours": 40.0, "disk_bytes": 10**9}}
    outlook = {"disk_free_bytes": 10**12, "volumes_basis": "counted"}
    plan = {"name": "night", "phases": [phase, phase | {"priority": 0}], "forecast": outlook, "alternatives": rows}
    text = question(plan, RunConfig(prompts=PromptsConfig(subsample=0.5)))
    assert not any(line.startswith("|") for line in text.split("\n"))
    assert text.startswith("### night: 2.4 days, 12 TB, 456.0 GPU-hours, 88,088 prompts\n- Generate responses: 40.0 h, 1 GB\n\n")
    assert "- **25% of every dataset** (choose *subset*, 25 per cent): 15.0 h, 3 TB, 22,022 prompts\n" in text
    assert "- **replies capped at half** (choose *cap*, 8192 tokens): 40.0 h, disk unknown\n" in text
    assert "another `server.urls`): time unknown, 12 TB, accept length 2.10 (2.00–2.20)" in text
    assert half_cap(plan) == 8192


async def test_the_plan_says_that_it_waits_and_the_form_begins_with_its_own_proposals(paper: Paper, run: str) -> None:
    config = config_with(operate={"decision": "ask", "decision_timeout_s": 600})
    waits: list[str] = []

    async def look_then_answer() -> None:
        while not Path(run, "plan.md").is_file() or "waiting for a decision" not in Path(run, "plan.md").read_text():
            await asyncio.sleep(0.1)
        waits.append(Path(run, "plan.md").read_text().split("\n")[0])
        await answer(run, {"choice": "accept"})

    await asyncio.gather(run_pipeline(run, config, until="generate"), look_then_answer())
    assert waits[0].startswith("# Plan of paper: waiting for a decision")
    assert "waiting for a decision" not in Path(run, "plan.md").read_text()


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
