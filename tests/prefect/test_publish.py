"""What a run shows while it works costs what has changed, whatever its length, and one refusal holds up nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterId

from eyas.progress import Progress, recorder
from eyas.workspace import RunFolder
from tasks.publish import Publisher
from tests.prefect.paper import config_with

NEVER = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run").create()
    run.run_json.write_text(json.dumps({"config": {**config_with().model_dump(mode="json"), "name": "run"}}))
    return run


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Method and artifact (its key, or its id) of every request about an artifact."""
    sent: list[tuple[str, str]] = []
    real = PrefectClient.request

    async def request(self: PrefectClient, method: str, path: str, *rest: Any, **options: Any) -> Any:
        if method in ("POST", "PATCH") and path in ("/artifacts/", "/artifacts/{id}"):
            sent.append((method, str(options["json"].get("key") or options["path_params"]["id"])))
        return await real(self, method, path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefectClient, "request", request)
    return sent


def report(run: RunFolder, name: str, done: int, total: int = 100) -> None:
    recorder(run.progress, every_s=0)(Progress(stage="generate", name=name, done=done, total=total, unit="responses"))


async def in_flow(folder: RunFolder, body: Any) -> None:
    @flow
    async def shows() -> None:
        async with get_client() as client:
            await body(Publisher(folder, lambda: "# Plan", lambda progress: None, client, since=NEVER))

    await shows()


async def test_only_what_has_changed_is_sent(folder: RunFolder, requests: list[tuple[str, str]]) -> None:
    async def body(publisher: Publisher) -> None:
        for name in ("b1", "b2", "b3"):
            report(folder, name, 1)
        await publisher.publish(is_last=True)
        assert sorted(requests) == [
            ("POST", f"run-{key}") for key in ("datasets", "generate-b1", "generate-b2", "generate-b3", "plan")
        ]
        requests.clear()
        await publisher.publish()
        assert requests == []
        report(folder, "b2", 2)
        await publisher.publish()
        assert requests == [("PATCH", str(publisher.ids["run-generate-b2"]))]
        wanted = ArtifactFilter(id=ArtifactFilterId(any_=[publisher.ids["run-generate-b2"]]))
        (bar,) = await publisher.client.read_artifacts(artifact_filter=wanted)
        assert float(str(bar.data)) == 2.0
        assert bar.description == "generate b2: 2 of 100 responses (2%)"

    await in_flow(folder, body)


async def test_an_update_leaves_no_event_behind(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("prefect.events.utilities.emit_event", lambda event, **details: events.append(event))

    async def body(publisher: Publisher) -> None:
        for done in range(5):
            report(folder, "b1", done)
            await publisher.publish()

    await in_flow(folder, body)
    assert "prefect.artifact.updated" not in events


async def test_what_is_refused_is_sent_again_and_holds_up_nothing_else(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, requests: list[tuple[str, str]]
) -> None:
    async def body(publisher: Publisher) -> None:
        for name in ("b1", "b2"):
            report(folder, name, 1)
        await publisher.publish()
        for name in ("b1", "b2"):
            report(folder, name, 2)
        real, refused = PrefectClient.request, publisher.ids["run-generate-b1"]

        async def request(self: PrefectClient, method: str, path: str, *rest: Any, **options: Any) -> Any:
            if options.get("path_params", {}).get("id") == refused:
                raise ConnectionError("gone")
            return await real(self, method, path, *rest, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(PrefectClient, "request", request)
            requests.clear()
            await publisher.publish()
        assert requests == [("PATCH", str(publisher.ids["run-generate-b2"]))]
        requests.clear()
        await publisher.publish()
        assert requests == [("PATCH", str(refused))]

    await in_flow(folder, body)
