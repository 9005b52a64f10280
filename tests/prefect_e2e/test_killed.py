"""`eyas run` whole, killed in every process it has: the same command again, the same result, nothing made twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.prefect_e2e.conftest import journal_ids, tiny_sections, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

PROMPTS = 40
"""Of each of two datasets; eight at a time keep the engine busy for long enough to be killed in the middle."""

SAME_BYTES = (
    "prompts/*/prompts.parquet", "responses/*/tokenized_data.jsonl", "merged/*.parquet", "hidden/shard-*.safetensors",
    "draft/export/*.safetensors", "draft/export/config.json",
)  # fmt: skip


class Command:
    """`eyas run` of one config, given as often as need be, in a home of its own."""

    def __init__(self, folder: Path, config: Path, run: Path) -> None:
        self._words = [sys.executable, "-m", "eyas.operate.cli", "run", "--config", str(config), "--run", str(run)]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self._environment |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.run, self.log = run, folder / "output.log"

    def start(self) -> psutil.Process:
        with open(self.log, "ab") as output:
            return psutil.Popen(self._words, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait(self, process: psutil.Process, code: int) -> None:
        left = process.wait()
        assert left == code, self.log.read_text()[-3000:]

    def until(self, process: psutil.Process, condition: Callable[[], Any]) -> Any:
        """Wait for a truth about a run that is under way; one that has ended will not make it come true."""

        def holds() -> Any:
            is_running = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            value = condition()
            assert value or is_running, self.log.read_text()[-3000:]
            return value

        return until(holds)

    def child(self, process: psutil.Process, module: str) -> psutil.Process:
        """The descendant that runs `python -m module`."""

        def found() -> psutil.Process | None:
            return next((child for child in descendants(process) if module in arguments(child)), None)

        child: psutil.Process = self.until(process, found)
        return child


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def config_of(folder: Path) -> Path:
    sections = tiny_sections(folder)
    datasets = [{**item, "quota": PROMPTS, "max_new_tokens": 40} for item in sections["prompts"]["datasets"]]
    sections["prompts"]["datasets"] = datasets
    sections["draft"]["max_steps"] = 300
    sections["server"]["engine"] = {"max_running_requests": 8}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_killed_in_the_engine_the_flow_and_the_trainer_the_same_command_ends_in_the_same_bytes(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    unbroken, broken = Command(tmp_path, config, tmp_path / "unbroken"), Command(tmp_path, config, tmp_path / "broken")
    unbroken.wait(unbroken.start(), 0)

    first = broken.start()
    broken.until(first, lambda: len(journal_ids(broken.run)) >= 3)
    engine = broken.child(first, "eyas.engine")
    engine.kill()
    before = len(journal_ids(broken.run))
    broken.until(first, lambda: len(journal_ids(broken.run)) > before + 3)  # the run has brought its engine back
    kept = journal_ids(broken.run)
    assert len(kept) < 2 * PROMPTS, "killed in the middle"
    flow = broken.child(first, "flows.pipeline")
    left_behind = [flow, *descendants(flow)]
    flow.kill()
    broken.wait(first, 1)
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left_behind))

    second = broken.start()
    broken.until(second, (broken.run / "progress" / "train.json").is_file)
    broken.child(second, "eyas.draft.train").kill()
    assert not (broken.run / "draft" / "manifest.json").exists(), "killed in the middle"
    broken.wait(second, 0)  # its task is tried again

    ids = journal_ids(broken.run)
    assert set(kept) <= set(ids)
    assert len(ids) == len(set(ids)) == 2 * PROMPTS, "nothing is generated twice"
    for pattern in SAME_BYTES:
        files = sorted(unbroken.run.glob(pattern))
        assert files, pattern
        for path in files:
            twin = broken.run / path.relative_to(unbroken.run)
            assert twin.read_bytes() == path.read_bytes(), twin
    results = [json.loads((command.run / "benchmark" / "results.json").read_bytes()) for command in (unbroken, broken)]
    for figure in ("outputs", "accept_length", "predicted_accept_length"):
        assert results[0][figure] == results[1][figure]


def test_the_command_itself_killed_takes_everything_with_it_and_goes_on(tmp_path: Path) -> None:
    command = Command(tmp_path, config_of(tmp_path), tmp_path / "run")
    first = command.start()
    command.until(first, lambda: len(journal_ids(command.run)) >= 3)
    family = descendants(first)
    first.kill()
    first.wait()
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family))
    before = journal_ids(command.run)
    assert len(before) < 2 * PROMPTS, "killed in the middle"

    second = command.start()
    command.until(second, (command.run / "merged" / "manifest.json").is_file)
    second.send_signal(signal.SIGINT)
    command.wait(second, 130)
    assert "To continue: eyas run --config" in command.log.read_text()
    ids = journal_ids(command.run)
    assert set(before) <= set(ids)
    assert len(ids) == len(set(ids)) == 2 * PROMPTS
