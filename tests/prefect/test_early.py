"""Work on later phases while replies are generated: complete datasets are extracted, the first replies rehearse the rest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ArtifactError
from tests.prefect.paper import Paper, config_with
from tests.prefect.test_pipeline import ALL_MADE, run_pipeline

OVERLAP: dict[str, Any] = {"overlap": "yes"}


async def happens(paper: Paper, piece: str) -> None:
    while not paper.made[piece]:
        await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.early.POLL_S", 0.1)


async def test_a_complete_dataset_is_extracted_while_another_generates(paper: Paper, run: str) -> None:
    paper.holds["B2_code"] = asyncio.Event()
    work = asyncio.create_task(run_pipeline(run, config_with(operate=OVERLAP)))
    await asyncio.wait_for(happens(paper, "extract B1_glaive"), 240)
    assert not paper.made["generate B2_code"], "the other still generates"
    assert not paper.made["merge"]
    paper.holds["B2_code"].set()
    assert (await work).is_completed()
    assert set(paper.made) == ALL_MADE
    assert set(paper.made.values()) == {1}, "phase 4 found the shards that were there"


async def test_where_processors_are_shared_nothing_starts_early(paper: Paper, run: str) -> None:
    paper.holds["B2_code"] = asyncio.Event()
    work = asyncio.create_task(run_pipeline(run))
    await asyncio.wait_for(happens(paper, "generate B1_glaive"), 240)
    await asyncio.sleep(0.5)
    assert not paper.made["extract B1_glaive"]
    paper.holds["B2_code"].set()
    assert (await work).is_completed()


async def test_an_early_extraction_that_fails_is_done_again_in_its_phase(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.extract.extract_shard.retries", 0)
    paper.failures["extract B1_glaive"] = 1
    assert (await run_pipeline(run, config_with(operate=OVERLAP))).is_completed()
    assert set(paper.made.values()) == {1}


async def test_the_first_replies_rehearse_what_follows_and_a_failure_is_told_at_once(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("flows.early.emit", lambda alert, run, message: told.append((alert, message)))
    monkeypatch.setattr("flows.early.RECORDS", 1)  # a paper dataset says one of two is done

    def rehearse(run: Any, config: Any) -> dict[str, Any]:
        paper.made["rehearsal"] += 1
        raise ArtifactError("the export lacks fc.weight")

    monkeypatch.setattr("eyas.operate.rehearsal.rehearse", rehearse)
    paper.holds["B1_glaive"] = asyncio.Event()
    work = asyncio.create_task(run_pipeline(run, config_with(operate=OVERLAP), until="merge"))
    await asyncio.wait_for(happens(paper, "rehearsal"), 240)
    paper.holds["B1_glaive"].set()
    assert (await work).is_completed(), "the run itself goes on"
    assert told == [("rehearsal failed", "the phases after generation fail on its first replies: the export lacks fc.weight")]


async def test_a_rehearsal_that_went_well_is_not_repeated(paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.early.RECORDS", 0)

    def rehearse(run: Any, config: Any) -> dict[str, Any]:
        paper.made["rehearsal"] += 1
        (run.root / "rehearsal.json").write_text("{}")
        return {"records": {"a": 8}, "seconds": {"merge": 1.0}}

    monkeypatch.setattr("eyas.operate.rehearsal.rehearse", rehearse)
    for _ in range(2):
        assert (await run_pipeline(run, config_with(operate=OVERLAP), until="generate")).is_completed()
        assert (await run_pipeline(run, config_with(operate=OVERLAP), until="merge")).is_completed()
    assert paper.made["rehearsal"] == 1
    assert Path(run, "rehearsal.json").is_file()


async def test_smaller_states_are_tried_once_while_generation_runs_and_told(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("flows.early.emit", lambda alert, run, message: told.append((alert, message)))
    monkeypatch.setattr("flows.early.CODEC_RECORDS", 1)
    Path(run, "hidden").mkdir(parents=True, exist_ok=True)
    Path(run, "rehearsal.json").write_text("{}")  # the rehearsal has been

    def probe_codecs(run: Any, config: Any) -> dict[str, Any]:
        paper.made["codecs"] += 1
        (run.hidden / "codecs.json").write_text("{}")
        return {"codecs": {"fp8": {"faults": []}, "int4": {"faults": ["states off by 20%"]}}}

    monkeypatch.setattr("eyas.operate.codec_probe.probe_codecs", probe_codecs)
    paper.holds["B1_glaive"] = asyncio.Event()
    work = asyncio.create_task(run_pipeline(run, config_with(operate=OVERLAP), until="merge"))
    await asyncio.wait_for(happens(paper, "codecs"), 60)
    paper.holds["B1_glaive"].set()
    assert (await work).is_completed()
    assert told == [("codecs tried", "smaller hidden states that keep what a draft needs of this target: fp8; see the plan")]
    assert (await run_pipeline(run, config_with(operate=OVERLAP), until="generate")).is_completed()
    assert paper.made["codecs"] == 1


async def test_the_learning_curve_is_measured_once_while_generation_runs_and_told(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("flows.early.emit", lambda alert, run, message: told.append((alert, message)))
    Path(run).mkdir(parents=True, exist_ok=True)
    Path(run, "rehearsal.json").write_text("{}")  # the rehearsal has been
    monkeypatch.setattr("flows.early.needed_replies", lambda run, config: 1)
    row = {
        "records": 2,
        "steps": 2,
        "accept_length": 2.0,
        "low": 1.9,
        "high": 2.1,
        "rest_buys": 0.1,
        "rest_low": 0.0,
        "rest_high": 0.2,
    }
    result = {"predictions": [{**row, "share": share} for share in (0.5, 1.0)], "stop_share": 1.0, "tolerance": 0.02}
    result |= {"points": [], "total_records": 4, "epochs": [], "limit": {}}

    def learning_curve(run: Any, config: Any) -> dict[str, Any]:
        paper.made["curve"] += 1
        (run.root / "learning-curve.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr("eyas.operate.learning_curve.learning_curve", learning_curve)
    paper.holds["B1_glaive"] = asyncio.Event()
    work = asyncio.create_task(run_pipeline(run, config_with(operate=OVERLAP), until="merge"))
    await asyncio.wait_for(happens(paper, "curve"), 60)
    paper.holds["B1_glaive"].set()
    assert (await work).is_completed()
    assert [alert for alert, _ in told] == ["learning curve"]
    assert "the second half buys +0.10" in told[0][1]
    plan = json.loads(Path(run, "plan.json").read_bytes())
    assert plan["learning_curve"] == told[0][1], "the plan says it at once"
    assert (await run_pipeline(run, config_with(operate=OVERLAP), until="extract")).is_completed()
    assert paper.made["curve"] == 1
