"""The change of service as a flow: one event per outcome, a failed run where the draft does not serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from deployments.catalogue import HOST_QUEUE, catalogue
from eyas.errors import ArtifactError, ServerError
from eyas.operate.deploy import Deployment, Outcome
from eyas.speculate.deploy import Check
from flows.deploy import deploy
from tests.prefect.paper import Paper
from tests.prefect.test_pipeline import run_pipeline


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    monkeypatch.setattr("tasks.deploy.emit", lambda alert, run, message: events.append((alert, message)))
    return events


def decide(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """The library's part, which tests/operate/test_deploy.py holds against servers, gives this outcome."""
    serves = outcome == "serving with the draft"
    check = Check(name="canary replies", holds=serves, seen="3 of 8 wrong", wanted="0 wrong")
    reason = "all checks hold" if serves else "canary replies: 3 of 8 wrong, wanted 0 wrong"
    deployment = Deployment(serves_draft=serves, reason=reason, checks=[check], at="2026-12-02T00:00:00Z", outcome=outcome)
    monkeypatch.setattr("tasks.deploy.deploy_run", lambda run, config, **options: deployment)


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        ("serving with the draft", "draft deployed"),
        ("rolled back: serving the target without draft", "draft rolled back"),
        ("nothing was switched", "draft refused"),
    ],
)
async def test_each_outcome_is_one_event_and_only_service_is_success(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]], outcome: Outcome, event: str
) -> None:
    await run_pipeline(run)
    decide(monkeypatch, outcome)
    state = await deploy(run=run, return_state=True)
    assert state.is_completed() == (event == "draft deployed")
    ((alert, message),) = told
    assert alert == event
    assert message.startswith(outcome)
    if not state.is_completed():
        assert "3 of 8 wrong" in (state.message or "")


async def test_what_the_canary_saw_is_an_artifact(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    await run_pipeline(run)
    decide(monkeypatch, "rolled back: serving the target without draft")
    state = await deploy(run=run, return_state=True)
    async with get_client() as client:
        artifacts = [item for item in await client.read_artifacts() if item.flow_run_id == state.state_details.flow_run_id]
    (found,) = [item for item in artifacts if (item.key or "").endswith("deployment")]
    assert "canary replies" in str(found.data)
    assert "rolled back" in (found.description or "")


async def test_a_run_without_a_benchmark_switches_nothing(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    await run_pipeline(run)
    decide(monkeypatch, "serving with the draft")
    (Path(run) / "benchmark" / "manifest.json").unlink()
    failure: Any = await (await deploy(run=run, return_state=True)).aresult(raise_on_failure=False)
    assert isinstance(failure, ArtifactError)
    assert told == []


async def test_a_way_back_that_fails_fails_the_run_after_one_try(
    paper: Paper, run: str, monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str]]
) -> None:
    await run_pipeline(run)
    tries = []

    def fail(*positional: Any, **named: Any) -> Deployment:
        tries.append(1)
        raise ServerError("mode generate never came up")

    monkeypatch.setattr("tasks.deploy.deploy_run", fail)
    failure: Any = await (await deploy(run=run, return_state=True)).aresult(raise_on_failure=False)
    assert isinstance(failure, ServerError)
    assert tries == [1]


def test_it_is_deployed_on_the_hosts_queue() -> None:
    (entry,) = [entry for entry in catalogue() if entry.name == "deploy"]
    assert entry.queue == HOST_QUEUE
