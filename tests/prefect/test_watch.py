"""The watch: what it finds in a run that somebody works on, and that it stays quiet about the others."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.operate.pipeline import open_run
from flows.watch import watch
from tasks.watch import look
from tests.prefect.paper import config_with


def running(root: Path, config: RunConfig, *, age_s: float = 0, pid: int = 0, **figures: float) -> Path:
    """A run whose generation recorded progress `age_s` seconds ago in the process `pid` (this one for 0)."""
    run = open_run(root, config)
    run.progress.mkdir(parents=True)
    at = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
    piece = {"stage": "generate", "name": "B1_glaive", "done": 1, "total": 9, "unit": "records"}
    message = {**piece, "figures": figures, "is_final": False, "at": at, "pid": pid or os.getpid(), "started_at": at}
    (run.progress / "generate-B1_glaive.json").write_text(json.dumps(message))
    return root


def test_a_run_that_moves_within_its_gates_is_left_in_peace(tmp_path: Path) -> None:
    running(tmp_path / "a", config_with(), gate_empty=0.01)
    assert look(tmp_path) == []


def test_a_stall_is_found(tmp_path: Path) -> None:
    running(tmp_path / "a", config_with(operate={"stall_s": 10}), age_s=60)
    (finding,) = look(tmp_path)
    assert finding.alert == "run stalled"
    assert "generate" in finding.message


def test_a_gate_above_its_warning_is_found_with_both_limits(tmp_path: Path) -> None:
    running(tmp_path / "a", config_with(), gate_empty=0.1)
    (finding,) = look(tmp_path)
    assert finding.alert == "gate breached"
    assert "B1_glaive: empty 10.0%, warns above 2.0%, stops at 20.0%" in finding.message


def test_a_disk_that_cannot_hold_what_is_still_to_be_written_is_found_with_both_figures(tmp_path: Path) -> None:
    root = running(tmp_path / "a", config_with())
    (root / "plan.json").write_text(json.dumps({"forecast": {"disk_bytes_to_write": 10**18}}))
    (finding,) = look(tmp_path)
    assert finding.alert == "disk low"
    assert "1,000,000,000,000,000,000 are still to be written" in finding.message


def test_a_server_that_does_not_answer_is_found(tmp_path: Path) -> None:
    running(tmp_path / "a", config_with(server={"kind": "sglang", "urls": ["http://127.0.0.1:9"]}))
    (finding,) = look(tmp_path)
    assert finding.alert == "server down"


def test_a_run_nobody_works_on_is_no_finding(tmp_path: Path) -> None:
    running(tmp_path / "a", config_with(operate={"stall_s": 10}), age_s=60, pid=2**22 + 1)
    assert look(tmp_path) == []


async def test_the_flow_tells_what_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("tasks.watch.emit", lambda alert, run, message: told.append((alert, run.name)))
    running(tmp_path / "a", config_with(), gate_empty=0.1)
    assert len(await watch(str(tmp_path))) == 1
    assert told == [("gate breached", "a")]
