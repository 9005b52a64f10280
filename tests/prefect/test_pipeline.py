"""The pipeline over a paper library: caching, redoing, gating, retries, one loop, one session."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId

from eyas.config import RunConfig
from eyas.errors import ServerError
from eyas.operate.tables import Table
from flows.pipeline import pipeline
from tests.prefect.paper import DATASETS, Paper, config_with

ALL_MADE = {
    "candidates B1_glaive", "candidates B2_code", "prepare B1_glaive", "prepare B2_code", "generate B1_glaive", "generate B2_code",
    "merge", "extract B1_glaive", "extract B2_code", "hidden", "train", "export", "benchmark",
}  # fmt: skip


def sections(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in RunConfig.model_fields if name != "name"}


async def run_pipeline(run: str, config: RunConfig | None = None, **parameters: Any) -> Any:
    return await pipeline(run=run, **sections(config or config_with()), **parameters, return_state=True)


async def task_runs(flow_run_id: UUID | None, wanted: int = 12) -> dict[str, str]:
    """Names to state names, once `wanted` runs have ended: Prefect records them a moment after the fact."""
    assert flow_run_id is not None
    deadline = time.monotonic() + 240
    async with get_client() as client:
        while True:
            found = await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
            if sum(1 for one in found if one.state is not None and one.state.is_final()) >= wanted or time.monotonic() > deadline:
                return {one.name: str(one.state_name) for one in found}
            await asyncio.sleep(0.1)


async def test_a_run_passes_all_phases_once_with_named_tasks(paper: Paper, run: str) -> None:
    state = await run_pipeline(run)
    assert state.is_completed(), state
    assert set(paper.made) == ALL_MADE
    assert set(paper.made.values()) == {1}
    names = (await task_runs(state.state_details.flow_run_id)).keys()
    assert {f"generate {name}" for name in DATASETS} <= names
    assert {f"extract {name} 0" for name in DATASETS} <= names


async def test_datasets_share_one_session_on_one_loop(paper: Paper, run: str) -> None:
    await run_pipeline(run)
    assert paper.sessions == 1
    assert len(paper.loops) == 1


async def test_the_same_inputs_again_make_nothing_and_open_no_session(paper: Paper, run: str) -> None:
    await run_pipeline(run)
    state = await run_pipeline(run)
    assert state.is_completed()
    assert set(paper.made.values()) == {1}
    assert paper.sessions == 1
    states = await task_runs(state.state_details.flow_run_id)
    assert {states[name] for name in states if not name.startswith("candidates")} == {"Cached"}


@pytest.mark.parametrize(
    ("victim", "piece", "harm"),
    [
        ("responses/B2_code", "generate B2_code", "deleted"),
        ("merged", "merge", "damaged"),
        ("hidden", "hidden", "damaged"),
        ("draft/export", "export", "deleted"),
    ],
)
async def test_a_harmed_output_is_made_again_and_nothing_else(paper: Paper, run: str, victim: str, piece: str, harm: str) -> None:
    """https://github.com/PrefectHQ/prefect/issues/8637: a cache hit must not outlive the file it speaks of."""
    await run_pipeline(run)
    data = Path(run) / victim / "data.txt"
    data.unlink() if harm == "deleted" else data.write_bytes(b"damaged!"[: data.stat().st_size - 1])
    assert (await run_pipeline(run)).is_completed()
    assert {name for name, count in paper.made.items() if count > 1} == {piece}


async def test_results_that_are_gone_mean_recompute_not_crash(paper: Paper, run: str) -> None:
    """The same issue, second half: a fresh container without the results, but with the run folder's data."""
    await run_pipeline(run)
    for path in (Path(run) / ".prefect").iterdir():
        path.unlink()
    assert (await run_pipeline(run)).is_completed()
    assert set(paper.made.values()) == {1}, "the bodies found their manifests"


async def test_a_changed_setting_redoes_what_depends_on_it_and_only_that(paper: Paper, run: str) -> None:
    await run_pipeline(run)
    assert (await run_pipeline(run, config_with(merging={"seed": 7}))).is_completed()
    assert {name for name, count in paper.made.items() if count > 1} >= {"merge"}
    assert paper.made["generate B1_glaive"] == paper.made["prepare B1_glaive"] == 1


async def test_a_changed_template_renders_anew_and_redoes_what_was_made_of_the_prompts(paper: Paper, run: str) -> None:
    await run_pipeline(run)
    changed = config_with(target={"chat_template_kwargs": {"enable_thinking": False}})
    assert (await run_pipeline(run, changed)).is_completed()
    redone = {name for name, count in paper.made.items() if count > 1}
    assert {"candidates B1_glaive", "candidates B2_code"}.isdisjoint(redone), "sources are not read again"
    assert redone >= {"prepare B1_glaive", "generate B1_glaive", "generate B2_code", "merge", "hidden", "train", "export"}


async def test_an_earlier_config_does_not_find_another_configs_bytes(paper: Paper, run: str) -> None:
    for seed in (0, 7, 0):
        assert (await run_pipeline(run, config_with(merging={"seed": seed}))).is_completed()
    assert paper.made["merge"] == 3


async def test_one_failing_dataset_lets_the_others_end_then_blocks_what_follows(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper.failures["generate B1_glaive"] = 99
    monkeypatch.setattr("tasks.generate.generate_dataset.retries", 0)
    state = await run_pipeline(run)
    assert state.is_failed()
    assert isinstance(await state.aresult(raise_on_failure=False), ServerError)
    assert paper.made["generate B2_code"] == 1
    assert paper.made["merge"] == 0


async def test_a_retried_dataset_joins_the_open_session(paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paper.failures["generate B1_glaive"] = 2
    monkeypatch.setattr("tasks.generate.generate_dataset.retry_delay_seconds", [0, 0, 0])
    assert (await run_pipeline(run, until="generate")).is_completed()
    assert paper.sessions == 1


async def test_until_stops_after_a_phase_and_a_later_run_goes_on(paper: Paper, run: str) -> None:
    await run_pipeline(run, until="merge")
    assert paper.made["extract B1_glaive"] == 0
    await run_pipeline(run)
    assert set(paper.made) == ALL_MADE
    assert set(paper.made.values()) == {1}


async def test_every_artifact_is_there_readable_and_says_its_value(paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [Table("lengths", "response median 7", [{"dataset": "B1_glaive", "p90": 9}])]
    monkeypatch.setattr("tasks.publish.changed_tables", lambda run, seen: tables)
    state = await run_pipeline(run)
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
    async with get_client() as client:
        found = {item.key.removeprefix("paper-"): item for item in await client.read_artifacts(artifact_filter=wanted)}
    assert {"plan", "datasets", "lengths", "report", "generate-b1-glaive", "generate-b2-code"} <= found.keys()
    assert all(item.description for item in found.values())
    assert found["lengths"].description == "response median 7"
    assert json.loads(found["lengths"].data) == tables[0].rows
    assert "| priority | phase | state |" in found["plan"].data
    assert [row["dataset"] for row in json.loads(found["datasets"].data)] == list(DATASETS)


async def test_a_draft_to_beat_is_measured_before_the_replies(paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(folder: object, config: RunConfig, *, api_key: str, say: Any) -> None:
        assert paper.made["prepare B1_glaive"] == 1
        assert paper.made["generate B1_glaive"] == 0
        say("measured")
        measured.append(config.draft.baseline)

    measured: list[str] = []
    monkeypatch.setattr("eyas.draft.baseline.import_baseline", lambda *_: None)
    monkeypatch.setattr("eyas.operate.baseline.benchmark_baseline", measure)
    state = await run_pipeline(run, config_with(draft={"baseline": "/theirs"}), until="generate")
    assert state.is_completed(), state
    assert measured == ["/theirs"]
