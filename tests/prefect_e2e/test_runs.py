"""Whole runs through a real server and worker: trigger, refuse, kill and retry, cancel, approve, zombies, schedules."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from tests.prefect_e2e.conftest import MANY, Stack, journal_ids, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


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
    flow_run_id = stack.start("killed", prompts=stack.long(80), draft={**stack.tiny["draft"], "max_steps": 600})
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
    stamps = {path: path.stat().st_mtime_ns for path in run.glob("*/**/manifest.json")}
    again = {"prompts": stack.long(80), "draft": {**stack.tiny["draft"], "max_steps": 600}}
    stack.wait_state(stack.start("killed", **again), "COMPLETED")
    assert stamps == {path: path.stat().st_mtime_ns for path in run.glob("*/**/manifest.json")}


def test_cancelling_leaves_no_child_process(stack: Stack) -> None:
    """https://github.com/PrefectHQ/prefect/issues/20979: the engine is a child of the flow's process."""
    flow_run_id = stack.start("cancelled", prompts=stack.long(600))
    stack.until(flow_run_id, lambda: len(journal_ids(stack.runs / "cancelled")) >= 1)
    tree = family(stack.pid(flow_run_id))
    assert len(tree) > 1, "the engine runs"
    stack.cancel(flow_run_id)
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in tree))


def test_a_person_approves_through_the_api(stack: Stack) -> None:
    flow_run_id = stack.start("approved", until="generate", operate={"decision": "ask", "decision_timeout_s": 3600})
    stack.wait_state(flow_run_id, "PAUSED")
    reply = stack.call(
        "POST", f"/flow_runs/{flow_run_id}/resume", run_input={"choice": "subset", "subset_percent": 50, "note": "ok"}
    )
    assert reply.json()["status"] == "ACCEPT", reply.text
    stack.wait_state(flow_run_id, "COMPLETED")
    decided = json.loads((stack.runs / "approved" / "plan.json").read_bytes())["decisions"]
    assert [item["what"] for item in decided] == ["set prompts.subsample=0.5", "accept"]


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
    stack.until(flow_run_id, lambda: heartbeats(stack, flow_run_id) >= 1)
    worker = next(parent for parent in psutil.Process(pid).parents() if "worker" in parent.cmdline())
    os.kill(worker.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    flow_run = stack.wait_state(flow_run_id, "CRASHED")
    assert "zombie" in flow_run["state"]["message"]
    stack.retry(flow_run_id)  # nothing the dead left locked stands in the way of the worker that took its place
    stack.pid(flow_run_id, other_than=pid)
    stack.until(flow_run_id, lambda: int((stack.runs / "zombie" / ".lock").read_text() or 0) not in (0, pid))
    stack.cancel(flow_run_id)


def heartbeats(stack: Stack, flow_run_id: str) -> int:
    events = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}}
    return int(stack.call("POST", "/events/filter", filter=events).json()["total"])


def test_a_finished_run_stays_finished(stack: Stack) -> None:
    """https://github.com/PrefectHQ/prefect/issues/18653: a state that is final is not changed by an automation's request."""
    flow_run_id = stack.start("finished", name="watch/watch-every-5-minutes")
    stack.wait_state(flow_run_id, "COMPLETED")
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "zombie: as the automation says it"}
    reply = stack.call("POST", f"/flow_runs/{flow_run_id}/set_state", state=crashed)
    assert stack.flow_run(flow_run_id)["state"]["type"] == "COMPLETED", reply.text
