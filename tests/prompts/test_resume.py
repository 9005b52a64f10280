from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eyas.files import digest_file
from tests.prompts.conftest import chat, write_rows

_DATASETS = ("A", "B")


@pytest.fixture
def run_killed(tmp_path: Path, make_config) -> Iterator[Callable[[Path, int], str]]:
    rng = random.Random(5)
    paths = {}
    for name in _DATASETS:
        rows: list[object] = [chat(" ".join(f"w{rng.randrange(900)}" for _ in range(12))) for _ in range(60)]
        rows[7:9] = [b"{broken", rows[3]]
        paths[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    config = tmp_path / "config.json"
    config.write_text(make_config(paths).model_dump_json())
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.prompts.killed_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(folder: Path, kill_at: int) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{config} {folder} {kill_at}\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    yield run
    child.kill()
    child.wait()


def _contents(run: Path) -> dict[str, str]:
    """Every file of a run but manifests, whose times differ; nothing else may be left over."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file() and path.name != "manifest.json"}
    return {name: digest_file(path) for name, path in sorted(files.items())}


def _kill_and_resume(run_killed: Callable[[Path, int], str], folder: Path, kill_at: int, unbroken: dict[str, str]) -> None:
    assert run_killed(folder, kill_at) == "killed"
    assert int(run_killed(folder, 0)) > 0
    assert _contents(folder) == unbroken, f"killed at file operation {kill_at}"


def test_killed_anywhere_and_run_again_gives_the_same_bytes(tmp_path: Path, run_killed) -> None:
    total = int(run_killed(tmp_path / "unbroken", 0))
    unbroken = _contents(tmp_path / "unbroken")
    assert total > 30
    assert {Path(name).name for name in unbroken} == {"candidates.arrow", "rejects.jsonl", "prompts.parquet"}
    for kill_at in sorted(random.Random(0).sample(range(1, total + 1), 10)):
        _kill_and_resume(run_killed, tmp_path / f"killed{kill_at}", kill_at, unbroken)


def test_killed_again_and_again_it_still_ends(tmp_path: Path, run_killed) -> None:
    run_killed(tmp_path / "unbroken", 0)
    folder = tmp_path / "killed"
    for kill_at in (3, 9, 14, 20, 12, 5):
        run_killed(folder, kill_at)
    run_killed(folder, 0)
    assert _contents(folder) == _contents(tmp_path / "unbroken")


@pytest.mark.soak
def test_killed_at_every_file_operation(tmp_path: Path, run_killed) -> None:
    total = int(run_killed(tmp_path / "unbroken", 0))
    unbroken = _contents(tmp_path / "unbroken")
    for kill_at in range(1, total + 1):
        _kill_and_resume(run_killed, tmp_path / f"killed{kill_at}", kill_at, unbroken)
