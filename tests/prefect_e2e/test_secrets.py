"""A key goes through whole runs, from a block and from a file, and stands in no database, log, event or file of theirs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import SecretStr

from blocks import SGLangServer
from eyas.engine.config import EngineConfig
from eyas.engine.process import EngineProcess
from tests.prefect_e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

SENTINEL = "sentinel-hush"
KEY = f"{SENTINEL}-right"


def test_a_key_stands_nowhere_after_runs_that_used_it(stack: Stack, database_url: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    target = stack.tiny["target"]["model"]
    with EngineProcess(target, config=EngineConfig(max_running_requests=8), api_key=KEY, log=tmp_path / "engine.log") as engine:
        save(stack, engine.url, KEY)
        of_block = stack.start("keyed-by-block", server_block="keyed", until="generate")
        stack.wait_state(of_block, "COMPLETED")
        save(stack, engine.url, f"{SENTINEL}-wrong")
        refused = stack.start("keyed-wrongly", server_block="keyed")
        stack.until(refused, lambda: stack.flow_run(refused)["state"]["type"] == "FAILED", allowed=["FAILED"])
        assert "refuses the API key" in stack.flow_run(refused)["state"]["message"]
    of_file = stack.start("keyed-by-file", server={"api_key_file": str(key_file)})
    stack.wait_state(of_file, "COMPLETED")

    for flow_run_id in (of_block, refused, of_file):  # the last lines have arrived
        stack.until(flow_run_id, lambda run=flow_run_id: "Finished in state" in logs(stack, run), allowed=["FAILED"])
    everything = dump(stack, database_url)
    assert "keyed-by-file" in everything, "the dump holds the runs"
    assert SENTINEL not in everything
    written = [path for folder in (stack.home, stack.runs) for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "engine-generate.log" for path in written)
    assert [path for path in [*written, tmp_path / "engine.log"] if SENTINEL.encode() in path.read_bytes()] == []


def save(stack: Stack, url: str, key: str) -> None:
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        SGLangServer(urls=[url], api_key=SecretStr(key)).save("keyed", overwrite=True, _sync=True)  # type: ignore[call-arg]


def logs(stack: Stack, flow_run_id: str) -> str:
    return stack.call("POST", "/logs/filter", logs={"flow_run_id": {"any_": [flow_run_id]}}, sort="TIMESTAMP_DESC").text


def dump(stack: Stack, database_url: str) -> str:
    """The whole database as text."""
    if not database_url:
        return "".join(path.read_bytes().decode(errors="replace") for path in stack.home.glob("prefect.db*"))
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"))
    program = str(found[-1]) if found else str(shutil.which("pg_dump"))
    done = subprocess.run([program, database_url.replace("+asyncpg", "")], capture_output=True, check=True)
    return done.stdout.decode(errors="replace")
