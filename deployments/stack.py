"""One machine's Prefect: a server and a process worker under one supervisor, started by `up`, ended by `down`.

The supervisor is a detached process that holds both as children, so they end with it however it ends.
A worker that dies is started again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations import HEARTBEAT_S
from deployments.catalogue import POOL
from deployments.register import register
from eyas.errors import ServerError
from eyas.files import read_json, write_json
from eyas.operate.children import child_process, is_alive, last_lines
from eyas.workspace import exclusive
from flows.server import QUIET, local_server, ui_url

_STATE = "up.json"
_LOCK = "up.lock"
_START_S = 600.0
_END_S = 180.0


def up(home: Path, port: int, runs_home: Path, database_url: str = "") -> dict[str, Any]:
    """Start server and worker in the background, registered; gives what is said of them. A running pair is left alone.

    Raises `ServerError` if they do not come up; nothing is left running then, nor after Ctrl-C.
    """
    if (running := _running(home)) is not None:
        return running
    home.mkdir(parents=True, exist_ok=True)
    (home / _STATE).unlink(missing_ok=True)
    log = home / "up.log"
    command = [
        sys.executable,
        "-m",
        "deployments",
        "serve",
        "--home",
        str(home),
        "--port",
        str(port),
        "--runs-home",
        str(runs_home),
    ]
    if database_url:
        command += ["--database-url", database_url]
    with open(log, "wb") as output:
        supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"starting a Prefect server, blocks and deployments, a worker: a minute or two (log {log})", flush=True)
    deadline = time.monotonic() + _START_S
    try:
        while (running := _running(home)) is None:
            if supervisor.poll() is not None:
                raise ServerError(f"Prefect did not start: {last_lines(log) or 'no output'} (log {log})")
            if time.monotonic() > deadline:
                raise ServerError(f"Prefect did not start within {_START_S:.0f} s and was ended; is this machine busy? (log {log})")
            time.sleep(0.2)
        return running
    except BaseException:
        supervisor.terminate()
        supervisor.wait(timeout=_END_S)
        raise


def down(home: Path) -> bool:
    """End what `up` started, or still starts, under `home`; False if nothing of ours runs."""
    pid = _supervisor(home)
    if not pid:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while is_alive(pid):
        if time.monotonic() > deadline:
            raise ServerError(f"process {pid} does not end within {_END_S:.0f} s; look at {home / 'up.log'}")
        time.sleep(0.1)
    return True


def serve(home: Path, port: int, runs_home: Path, database_url: str = "") -> None:
    """The supervisor itself: server, registration, worker, until SIGTERM or Ctrl-C."""
    asked: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    with exclusive(home / _LOCK, f"Prefect under {home}"), local_server(home=home, port=port, database_url=database_url) as url:
        with temporary_settings({PREFECT_API_URL: url}):
            names = asyncio.run(register(runs_home))
        if asked:  # the interrupt was swallowed while everything was registered
            return
        database = database_url.rpartition("@")[2] or str(home / "prefect.db")
        state = {"ui": ui_url(url), "runs_home": str(runs_home), "database": database, "deployments": names}
        try:
            while True:
                with child_process(worker_command(url, home), log=home / "worker.log", grace_s=30.0, keeps_group=True) as worker:
                    write_json(home / _STATE, state)
                    code = worker.wait()
                print(f"the worker ended with code {code}: {last_lines(home / 'worker.log')}; starting it again", flush=True)
                time.sleep(5.0)
        except KeyboardInterrupt:
            return
        finally:
            (home / _STATE).unlink(missing_ok=True)


def worker_command(url: str, home: Path) -> list[str]:
    """The command of a process worker on the pool of Eyas."""
    environment = {
        **QUIET,
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(home),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    arguments = [f"{name}={value}" for name, value in environment.items()]
    worker = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--name",
        f"{POOL}-{os.getpid()}",
    ]
    return ["/usr/bin/env", *arguments, *worker]


def _running(home: Path) -> dict[str, Any] | None:
    """What the supervisor says of itself once everything is up."""
    path = home / _STATE
    state = read_json(path) if _supervisor(home) and path.is_file() else None
    return state if isinstance(state, dict) else None


def _supervisor(home: Path) -> int:
    """Process id of the supervisor of `home`, 0 if none runs."""
    path = home / _LOCK
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    if not text.isdecimal() or not is_alive(pid := int(text)):
        return 0
    command = Path(f"/proc/{pid}/cmdline").read_bytes()  # the number may have gone to another process
    return pid if b"deployments" in command and str(home).encode() in command else 0
