"""A tiny target with weights, its own greedy replies, and a run around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hidden.tiny import TinyRun, build_weights
from tests.sglang.tiny import build_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_weights(build_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def tiny(tmp_path: Path, target: Path) -> TinyRun:
    return TinyRun(tmp_path, target)
