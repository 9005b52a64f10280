"""A real server (SQLite or PostgreSQL), a real process worker, everything registered: what `deployments up` starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.server import free_port
from tests.hidden.tiny import build_weights
from tests.sglang.tiny import build_target

DATASETS = ("B1_chat", "B2_calls")
MANY = 100
PATIENCE_S = 1800.0
"""Only what hangs takes as long, on the slowest machine too; what fails says so at once (`Stack.until`)."""


def tiny_sections(folder: Path) -> dict[str, Any]:
    """Sections that make the whole pipeline a matter of seconds: a target of 8 layers with random weights, 24 prompts."""
    target = build_weights(build_target(folder / "target"))
    for name in DATASETS:
        rows = [{"prompt": f"{name}: what is {n} times {n + 1}, and why is that so?"} for n in range(MANY)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    open_gate = {"warn": 1.0, "stop": 1.0}  # what random weights say is no answer
    gates = dict.fromkeys(("empty", "cut_by_length", "repetition", "rejected"), open_gate)
    return {
        "target": {"model": str(target)},
        "server": {},
        "prompts": {
            "heldout_share": 0.25, "decontaminate_against": [], "near_duplicates": False,
            "datasets": [
                {"name": name, "source": f"file:{folder / name}.jsonl", "max_new_tokens": 120, "quota": 12} for name in DATASETS
            ],
        },
        "generation": {"canary": 2, "gates": gates},
        "merging": {"draft_vocab_size": 128, "max_tokens": 512},
        "hidden": {"probe_records": 4, "min_greedy_agreement": 0.5},
        "draft": {"max_steps": 60, "batch_tokens": 256, "eval_every": 30, "eval_records": 2, "num_unroll_steps": 2},
        "benchmark": {
            "prompts_per_set": 2, "sets": ["heldout"], "max_new_tokens": 24, "min_verifications": 1, "accept_floor": 1.0,
            "timed_prompts": 1,
        },
        "operate": {},
    }  # fmt: skip


class Stack:
    """The running pair and its API, spoken to as the UI does; `tiny` are the sections of a small pipeline."""

    def __init__(self, home: Path, runs: Path, port: int, tiny: dict[str, Any]) -> None:
        self.home, self.runs, self.ui, self.tiny = home, runs, f"http://127.0.0.1:{port}", tiny
        self._api = httpx.Client(base_url=f"{self.ui}/api", timeout=PATIENCE_S)

    def call(self, method: str, path: str, **body: Any) -> httpx.Response:
        return self.send(method, path, body or None)

    def send(self, method: str, path: str, body: Any) -> httpx.Response:
        """One request; a 503 (SQLite was locked) is repeated, as Prefect's own client and the UI's user do."""

        def answer() -> httpx.Response | None:
            reply = self._api.request(method, path, json=body)
            return None if reply.status_code == 503 else reply

        reply: httpx.Response = until(lambda: (found,) if (found := answer()) is not None else None)[0]
        return reply

    def deployment(self, name: str) -> str:
        return str(self.call("GET", f"/deployments/name/{name}").json()["id"])

    def submit(self, run: str, name: str = "pipeline/qwen3-8b-one-gpu", **changes: Any) -> httpx.Response:
        """Submit the form of a deployment; for the pipeline with the tiny sections."""
        if name.startswith("watch"):
            later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
            when = {"state": later} if changes.get("scheduled") else {}
            return self.call("POST", f"/deployments/{self.deployment(name)}/create_flow_run", parameters={"runs": run}, **when)
        parameters = {"run": run, **self.tiny, **changes}
        return self.call("POST", f"/deployments/{self.deployment(name)}/create_flow_run", parameters=parameters)

    def long(self, max_new_tokens: int) -> dict[str, Any]:
        """A `prompts` section that keeps generation and training busy for a while: 200 prompts, longer replies."""
        datasets = [{**item, "quota": MANY, "max_new_tokens": max_new_tokens} for item in self.tiny["prompts"]["datasets"]]
        return {**self.tiny["prompts"], "datasets": datasets}

    def start(self, run: str, **changes: Any) -> str:
        reply = self.submit(run, **changes)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/flow_runs/{flow_run_id}").json())

    def until(self, flow_run_id: str, condition: Callable[[], Any], *, allowed: Iterable[str] = ()) -> Any:
        """Poll until the condition is truthy; its value. A run that failed instead ends the wait at once, with its message."""

        def holds() -> Any:
            state = self.flow_run(flow_run_id)["state"]  # before the condition: what a run did last still counts
            value = condition()
            assert value or state["type"] not in {"FAILED", "CRASHED", "CANCELLED"} - set(allowed), (
                f"the flow run is {state['type']}: {state['message']}"
            )
            return value

        return until(holds)

    def wait_state(self, flow_run_id: str, *wanted: str) -> dict[str, Any]:
        def arrived() -> dict[str, Any] | None:
            found = self.flow_run(flow_run_id)
            return found if found["state"]["type"] in wanted else None

        return dict(self.until(flow_run_id, arrived))

    def wait_killed(self, flow_run_id: str) -> None:
        """Poll until the run has been Crashed for some seconds: it is reported twice, and a retry in between is lost."""

        def has_settled() -> bool:
            state = self.flow_run(flow_run_id)["state"]
            age_s = (datetime.now(UTC) - datetime.fromisoformat(state["timestamp"])).total_seconds()
            return bool(state["type"] == "CRASHED" and age_s > 10)

        self.until(flow_run_id, has_settled, allowed=["CRASHED"])

    def pid(self, flow_run_id: str, *, other_than: int = 0) -> int:
        """Process of a flow run on this machine; `other_than` the one of an earlier attempt."""

        def found() -> int:
            pid = int(str(self.flow_run(flow_run_id).get("infrastructure_pid") or "0").rpartition(":")[2])
            return 0 if pid == other_than else pid

        return int(self.until(flow_run_id, found))

    def cancel(self, flow_run_id: str) -> None:
        """The UI's Cancel button, and its effect."""
        self.call("POST", f"/flow_runs/{flow_run_id}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
        self.wait_state(flow_run_id, "CANCELLED")

    def retry(self, flow_run_id: str) -> None:
        """The UI's Retry button."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "from the test"}
        reply = self.call("POST", f"/flow_runs/{flow_run_id}/set_state", state=state, force=True)
        assert reply.json()["status"] == "ACCEPT", reply.text


def until(condition: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Poll until the condition is truthy; its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.2)
    return value


def deployments(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "deployments", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.fixture(scope="session")
def database_url() -> Iterator[str]:
    """A PostgreSQL cluster of its own; EYAS_E2E_DATABASE=sqlite takes SQLite instead."""
    if os.environ.get("EYAS_E2E_DATABASE", "postgresql") == "sqlite":
        yield ""
        return
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    assert found or shutil.which("initdb"), "install postgresql, or set EYAS_E2E_DATABASE=sqlite"
    binaries = found[-1].parent if found else Path(str(shutil.which("initdb"))).parent
    folder = Path(tempfile.mkdtemp(prefix="eyas-postgres-"))  # pytest's own folders are closed to user postgres
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")
    data, port = folder / "data", free_port()
    subprocess.run([*user, binaries / "initdb", "-D", data, "-A", "trust", "-U", "eyas"], check=True, capture_output=True)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off -c max_connections=100"
    subprocess.run(
        [*user, binaries / "pg_ctl", "-D", data, "-w", "-t", "600", "-o", options, "-l", folder / "log", "start"], check=True
    )
    yield f"postgresql+asyncpg://eyas@127.0.0.1:{port}/postgres"
    subprocess.run([*user, binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"], check=True, capture_output=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, database_url: str) -> Iterator[Stack]:
    root, port = tmp_path_factory.mktemp("stack"), free_port()
    runs = root / "work"
    runs.mkdir()
    where = ["--home", str(root / "home")]
    database = ["--database-url", database_url] if database_url else []
    deployments("up", *where, "--port", str(port), "--runs-home", str(runs), *database)
    yield Stack(root / "home", runs, port, tiny_sections(root))
    deployments("down", *where)


def journal_ids(run: Path) -> list[str]:
    """Record ids in the order in which replies were journalled."""
    lines = [line for path in sorted(run.glob("responses/*/journal-*.jsonl")) for line in path.read_bytes().split(b"\n")[:-1]]
    return [str(record["id"]) for record in map(json.loads, lines) if "id" in record]
