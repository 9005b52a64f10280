"""Fixtures of the generation tests: a tiny target, short retries, and readers of what a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.generation import asking
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


def journal_entries(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    entries = []
    for path in sorted(run.responses(dataset).glob("journal-*.jsonl")):
        entries += [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    return entries


def tokenized_rows(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    raw = (run.responses(dataset) / "tokenized_data.jsonl").read_bytes()
    return [json.loads(line) for line in raw.split(b"\n") if line]
