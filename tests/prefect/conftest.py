"""One Prefect test server for the whole package, and a paper library in place of the phases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tests.prefect.paper import Paper, install


@pytest.fixture(scope="package", autouse=True)
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=600), temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    library = Paper()
    install(library, monkeypatch)
    return library


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "paper")
