"""A benchmark whose process, or whose engine, is killed outright goes on where it was and ends in the same replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eyas.errors import ServerError
from eyas.files import write_json
from eyas.progress import Progress
from eyas.speculate.benchmark import benchmark
from eyas.workspace import RunFolder
from tests.speculate.conftest import model
from tests.speculate.fitted_run import fitted_run
from tests.speculate.test_benchmark import Stage, run, stage, target_folder

__all__ = ["model", "run", "stage", "target_folder"]  # fixtures
ROOT = Path(__file__).parents[2]


def start(run: RunFolder) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.speculate.benchmark_child", str(run.root)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True)


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not is_so():
        assert process.poll() is None, "the benchmark ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    (path,) = run.benchmark.glob("raw-heldout-*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def blocks_of(run: RunFolder) -> dict[str, int]:
    """Kept blocks, each with the time at which it was written."""
    return {path.name: path.stat().st_mtime_ns for path in run.benchmark.glob("blocks-*/*.json")}


def test_a_killed_process_loses_no_block_but_the_one_under_way(stage: Stage) -> None:
    """kill -9 between servers that live on; what was sent afterwards is the missing blocks and nothing else."""
    benchmark(stage.run, stage.config)
    unbroken, whole = rows_of(stage.run), len(stage.off.requests) + len(stage.on.requests)
    for path in stage.run.benchmark.iterdir():
        path.unlink()
    write_json(stage.run.run_json, {"config": stage.config.model_dump(mode="json")})
    sent = len(stage.off.requests) + len(stage.on.requests)
    child = start(stage.run)
    wait_until(lambda: len(blocks_of(stage.run)) >= 2, child)
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not (stage.run.benchmark / "manifest.json").exists()
    kept = len(blocks_of(stage.run))
    before = len(stage.off.requests) + len(stage.on.requests) - sent
    benchmark(stage.run, stage.config)
    again = len(stage.off.requests) + len(stage.on.requests) - sent - before
    assert 2 <= kept < 6
    assert again <= whole - 2 * 5, "the two counted blocks of five prompts were asked again"
    assert rows_of(stage.run) == unbroken


@pytest.mark.soak
def test_a_killed_engine_fails_the_benchmark_at_once_and_the_next_start_goes_on(model: Any, tmp_path: Path) -> None:
    run, config = fitted_run(model, tmp_path, concurrency=[1, 4])
    benchmark(run, config)
    unbroken = rows_of(run)
    for path in run.benchmark.iterdir():
        path.unlink()
    killed: list[str] = []

    def kill(progress: Progress) -> None:
        """After the third block, the engine with the draft."""
        if len(blocks_of(run)) == 3 and not killed:
            for child in psutil.Process().children():
                if "--draft-dir" in child.cmdline():
                    child.kill()
                    killed.append(child.name())

    with pytest.raises(ServerError, match=r"127\.0\.0\.1"):
        benchmark(run, config, kill)
    assert killed
    kept = blocks_of(run)
    assert len(kept) >= 3
    mended: list[dict[str, int]] = []
    benchmark(run, config, lambda progress: mended.append(blocks_of(run)))
    assert all(max(mended, key=len)[name] == at for name, at in kept.items()), "a kept block was measured again"
    assert rows_of(run) == unbroken


@pytest.mark.soak
def test_a_killed_benchmark_leaves_no_engine_behind(model: Any, tmp_path: Path) -> None:
    run, config = fitted_run(model, tmp_path, concurrency=[1, 4], repeats=4)
    child = start(run)
    wait_until(lambda: len(blocks_of(run)) >= 3, child)
    engines = psutil.Process(child.pid).children()
    assert len(engines) == 2
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    gone, alive = psutil.wait_procs(engines, timeout=30)
    assert (len(gone), alive) == (2, [])
    kept = blocks_of(run)
    benchmark(run, config)
    assert {row["outcome"] for row in rows_of(run)} == {"identical"}
    assert kept
