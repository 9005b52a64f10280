"""Whole runs through a real server and worker: trigger, refuse, kill and retry, cancel, approve, zombies, schedules."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.catalogue import HOST_QUEUE, LIGHT_QUEUE, Entry
from deployments.register import deploy
from tests.prefect_e2e.conftest import MANY, Stack, journal_ids, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def busy(stack: Stack) -> dict[str, Any]:
    """Sections that keep a run in generation and in training for long enough to be killed there."""
    return {"prompts": stack.long(80), "draft": {**stack.tiny["draft"], "max_steps": 600}}


def test_a_wrong_value_is_refused_before_a_run_exists(stack: Stack) -> None:
    reply = stack.submit("refused", generation={"canary": -1})
    assert reply.status_code == 409
    assert "-1 is less than the minimum of 0" in reply.text
    assert not (stack.runs / "refused").exists()


def test_an_unknown_key_is_refused_before_a_run_exists(stack: Stack) -> None:
    reply = stack.submit("refused", draft={"learning_rat": 1})
    assert reply.status_code == 409
    assert "learning_rat" in reply.text


def test_a_missing_block_fails_at_once_with_the_next_step(stack: Stack) -> None:
    flow_run = stack.wait_state(stack.start("no-block", server_block="nowhere"), "FAILED")
    assert "no SGLang Server block named 'nowhere'" in flow_run["state"]["message"]


def test_killed_in_generation_and_in_training_a_retry_goes_on_to_the_end(stack: Stack) -> None:
    """https://github.com/PrefectHQ/prefect/issues/16515: what a dead process leaves behind is taken up by manifest."""
    run = stack.runs / "killed"
    flow_run_id = stack.start("killed", **busy(stack))
    stack.until(flow_run_id, lambda: len(journal_ids(run)) >= 3)
    first = stack.pid(flow_run_id)
    os.kill(first, signal.SIGKILL)
    stack.wait_killed(flow_run_id)
    before = journal_ids(run)
    assert len(before) < 2 * MANY, "killed in the middle"

    stack.retry(flow_run_id)
    stack.until(flow_run_id, lambda: (run / "progress" / "train.json").is_file())
    tree = family(stack.pid(flow_run_id, other_than=first))
    os.kill(tree[0].pid, signal.SIGKILL)
    stack.wait_killed(flow_run_id)
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in tree))
    responses = {path: path.read_bytes() for path in run.glob("responses/*/tokenized_data.jsonl")}
    assert not (run / "draft" / "manifest.json").exists(), "killed in the middle"

    stack.retry(flow_run_id)
    stack.wait_state(flow_run_id, "COMPLETED")
    ids = journal_ids(run)
    assert set(before) <= set(ids)
    assert len(ids) == len(set(ids)) == 2 * MANY, "nothing is generated twice"
    assert responses == {path: path.read_bytes() for path in run.glob("responses/*/tokenized_data.jsonl")}
    assert json.loads((run / "benchmark" / "results.json").read_bytes())["outputs"]["wrong"] == 0


def test_the_finished_run_again_makes_nothing(stack: Stack) -> None:
    run = stack.runs / "killed"
    if not (run / "benchmark" / "manifest.json").is_file():  # this test runs alone
        stack.wait_state(stack.start("killed", **busy(stack)), "COMPLETED")
    stamps = {path: path.stat().st_mtime_ns for path in run.glob("*/**/manifest.json")}
    assert {path.relative_to(run).parts[0] for path in stamps} >= {"prompts", "responses", "merged", "hidden", "draft", "benchmark"}
    stack.wait_state(stack.start("killed", **busy(stack)), "COMPLETED")
    assert stamps == {path: path.stat().st_mtime_ns for path in run.glob("*/**/manifest.json")}


@pytest.mark.parametrize("phase", ["generation", "training"])
def test_cancelling_leaves_no_child_process(stack: Stack, phase: str) -> None:
    """https://github.com/PrefectHQ/prefect/issues/20979, https://github.com/PrefectHQ/prefect/issues/17593

    The engine and the trainer are children of the flow's process, each in a group of its own.
    """
    name = f"cancelled-in-{phase}"
    run = stack.runs / name
    if phase == "generation":
        flow_run_id = stack.start(name, prompts=stack.long(600))
        stack.until(flow_run_id, lambda: len(journal_ids(run)) >= 1)
    else:
        flow_run_id = stack.start(name, draft={**stack.tiny["draft"], "max_steps": 1_000_000})
        stack.until(flow_run_id, (run / "progress" / "train.json").is_file)
    tree = family(stack.pid(flow_run_id))
    assert len(tree) > 1, "a child runs"
    stack.cancel(flow_run_id)
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in tree))


def test_a_second_run_waits_in_the_queue_until_the_host_is_free(stack: Stack) -> None:
    first = stack.start("first-in", until="generate")
    second = stack.start("second-in", until="prepare")
    times = [stack.wait_state(flow_run_id, "COMPLETED") for flow_run_id in (first, second)]
    assert times[0]["work_queue_name"] == times[1]["work_queue_name"] == HOST_QUEUE
    assert datetime.fromisoformat(times[1]["start_time"]) >= datetime.fromisoformat(times[0]["end_time"])


@pytest.mark.parametrize(
    ("answer", "what", "state"),
    [
        ({"choice": "accept"}, ["accept"], "COMPLETED"),
        ({"choice": "subset", "subset_percent": 50, "note": "ok"}, ["set prompts.subsample=0.5", "accept"], "COMPLETED"),
        ({"choice": "cap", "max_new_tokens": 30}, ["set generation.max_new_tokens=30", "accept"], "COMPLETED"),
        ({"choice": "abort", "note": "too dear"}, ["abort"], "FAILED"),
    ],
    ids=lambda value: value["choice"] if isinstance(value, dict) else "",
)
def test_a_person_decides_through_the_api(stack: Stack, answer: dict[str, Any], what: list[str], state: str) -> None:
    run = stack.runs / f"decided-{answer['choice']}"
    flow_run_id = stack.start(run.name, until="generate", operate={"decision": "ask", "decision_timeout_s": 3600})
    stack.wait_state(flow_run_id, "PAUSED")
    assert not journal_ids(run)

    def resume() -> httpx.Response | None:  # a run shows as paused some milliseconds before its form can be answered
        reply = stack.call("POST", f"/flow_runs/{flow_run_id}/resume", run_input=answer)
        return None if "Run input schema not found" in reply.text else reply

    reply = until(resume)
    assert reply.json()["status"] == "ACCEPT", reply.text
    ended = stack.until(
        flow_run_id, lambda: (found := stack.flow_run(flow_run_id))["state"]["type"] == state and found, allowed=[state]
    )
    decided = json.loads((run / "plan.json").read_bytes())["decisions"]
    assert [(item["what"], item["who"]) for item in decided] == [(one, "operator") for one in what]
    if state == "FAILED":
        assert "too dear" in ended["state"]["message"]
        assert not journal_ids(run)
        return
    assert len(journal_ids(run)) == (12 if answer["choice"] == "subset" else 24)
    lengths = [sum(row["loss_mask"]) for row in replies(run)]
    assert max(lengths) <= 30 if answer["choice"] == "cap" else max(lengths) > 30
    report = (run / "report.md").read_text()
    assert all(f"**{one}**" in report for one in what)


def test_nobody_decides_and_the_stated_default_holds(stack: Stack) -> None:
    ask = {"decision": "ask", "decision_timeout_s": 8, "decision_default": "abort"}
    flow_run_id = stack.start("undecided", operate=ask)
    ended = stack.until(
        flow_run_id, lambda: (found := stack.flow_run(flow_run_id))["state"]["type"] == "FAILED" and found, allowed=["FAILED"]
    )
    assert "nobody answered within 8 s; this is operate.decision_default" in ended["state"]["message"]
    (decided,) = json.loads((stack.runs / "undecided" / "plan.json").read_bytes())["decisions"]
    assert (decided["what"], decided["who"]) == ("abort", "config")


def test_a_schedule_fires(stack: Stack) -> None:
    deployment = stack.deployment("watch/watch-every-5-minutes")
    schedule = {"schedule": {"interval": 20.0, "anchor_date": "2026-01-01T00:00:00Z"}, "active": True}
    created = stack.send("POST", f"/deployments/{deployment}/schedules", [schedule])
    assert created.status_code == 201, created.text
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    until(lambda: any(found["auto_scheduled"] for found in stack.call("POST", "/flow_runs/filter", **wanted).json()))


def test_when_the_worker_dies_too_the_automation_ends_the_run(stack: Stack) -> None:
    """Nobody is left to report the crash but the silence, and a new worker has another name.

    https://github.com/PrefectHQ/prefect/issues/16515, https://github.com/oqtopus-team/qdash/issues/1351
    """
    flow_run_id = stack.start("zombie", prompts=stack.long(1200))
    pid = stack.pid(flow_run_id)
    stack.until(flow_run_id, lambda: heartbeats(stack, flow_run_id))
    worker = next(parent for parent in psutil.Process(pid).parents() if "worker" in parent.cmdline())
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    flow_run = stack.wait_state(flow_run_id, "CRASHED")
    assert "zombie" in flow_run["state"]["message"]
    stack.retry(flow_run_id)  # nothing the dead left locked stands in the way of the worker that took its place
    stack.pid(flow_run_id, other_than=pid)
    stack.until(flow_run_id, lambda: int((stack.runs / "zombie" / ".lock").read_text() or 0) not in (0, pid))
    stack.cancel(flow_run_id)


def heartbeats(stack: Stack, flow_run_id: str) -> list[dict[str, Any]]:
    events = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}}
    return list(stack.call("POST", "/events/filter", filter=events).json()["events"])


def replies(run: Path) -> list[dict[str, Any]]:
    """Accepted replies of all datasets."""
    lines = [line for path in run.glob("responses/*/tokenized_data.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line) for line in lines]


LINGERING = """
import threading
import time

from prefect import flow


@flow(name="lingering")
def lingering():
    threading.Thread(target=time.sleep, args=(60,)).start()  # no daemon: the process ends a minute after the run
"""


def test_a_finished_run_stays_finished_though_its_process_lingers_and_beats(stack: Stack) -> None:
    """https://github.com/PrefectHQ/prefect/issues/18653: a heartbeat that arrives after the end is followed by nothing."""
    path = stack.runs / "lingering.py"
    path.write_text(LINGERING)
    spec = importlib.util.spec_from_file_location("lingering", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lingering"] = module
    spec.loader.exec_module(module)
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        asyncio.run(deploy(Entry(flow=module.lingering, name="test", description="Lingers.", queue=LIGHT_QUEUE), stack.runs))
    reply = stack.call("POST", f"/deployments/{stack.deployment('lingering/test')}/create_flow_run", parameters={})
    flow_run_id = str(reply.json()["id"])
    ended = stack.wait_state(flow_run_id, "COMPLETED")
    assert psutil.Process(stack.pid(flow_run_id)).is_running(), "the process lingers"

    (late,) = until(lambda: heartbeats(stack, flow_run_id))[:1]
    late |= {"id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat(), "follows": None}
    assert stack.send("POST", "/events", [late]).status_code == 204
    about = {"resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}}
    failed = {"event": {"name": ["prefect.automation.action.failed"]}, "related": about["resource"]}
    until(lambda: stack.call("POST", "/events/filter", filter=failed).json()["events"])  # the automation tried, and was refused
    assert stack.flow_run(flow_run_id)["state"]["id"] == ended["state"]["id"]
