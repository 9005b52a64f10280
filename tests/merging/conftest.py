"""Response files as generation writes them, with what each test wants to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.merging.responses import Responses


@pytest.fixture
def responses(tmp_path: Path) -> Responses:
    return Responses(tmp_path)
