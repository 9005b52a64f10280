"""Fixtures of the generation tests: a tiny target, short retries, and readers of what a run wrote."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.generation import asking, session
from eyas.sglang import pool
from eyas.workspace import RunFolder
from tests.sglang.tiny import build_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def thinking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "tiny-thinking", thinks=True)


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(asking, "BUSY_RETRY_S", 0.05)
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", 0.05)


@pytest.fixture
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "TICK_S", 0.05)
    monkeypatch.setattr(session, "LOOK_S", 0.1)
    monkeypatch.setattr(session, "FORECAST_S", 0.2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode == 0
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # tables of prompts stay mapped until they are collected


async def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def journal_entries(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    entries = []
    for path in sorted(run.responses(dataset).glob("journal-*.jsonl")):
        entries += [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return entries


def tokenized_rows(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    raw = (run.responses(dataset) / "tokenized_data.jsonl").read_bytes()
    return [json.loads(line) for line in raw.split(b"\n") if line]
