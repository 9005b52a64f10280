"""One host through its four modes with real processes: the operator's commands start and end them, the host proves each."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.config import load_config
from eyas.errors import ServerError
from eyas.operate.children import is_alive
from eyas.operate.config import Mode
from eyas.operate.hosts import CommandHost, Draft, host_of, sides_of
from eyas.speculate.config import DraftShape
from eyas.workspace import RunFolder

SERVER = """
    import http.server, json, os, pathlib, sys
    port, info = int(sys.argv[1]), json.loads(sys.argv[2])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(info).encode()
            self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
            self.wfile.write(body)
        def log_message(self, *words): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    (pathlib.Path(sys.argv[3]) / f"bound-{os.getpid()}").touch()
    server.serve_forever()
"""
# As an operator's script does it: end what runs, start what is wanted in the background, return.
CONTROL = """
    import json, os, pathlib, signal, subprocess, sys, time
    folder, port, mode, draft, steps, top_k, tokens = (*map(pathlib.Path, sys.argv[1:2]), *sys.argv[2:])
    pid_file = folder / "pid"
    if pid_file.exists() and not (folder / "stuck").exists():
        pid = int(pid_file.read_text())
        try:
            os.kill(pid, signal.SIGTERM)
            while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
        except (ProcessLookupError, FileNotFoundError): pass
        pid_file.unlink()
    if mode == "none": sys.exit()
    info = {"model_path": "/somewhere/target"}
    if mode == "extract": info["enable_return_aux_hidden_states"] = True
    if mode == "draft":
        info |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft, "speculative_num_steps": int(steps),
                 "speculative_eagle_topk": int(top_k), "speculative_num_draft_tokens": int(tokens)}
    log = open(folder / "server.log", "ab")
    server = subprocess.Popen([sys.executable, folder / "server.py", port, json.dumps(info), folder], stdout=log, stderr=log)
    while server.poll() is None and not (folder / f"bound-{server.pid}").exists(): time.sleep(0.01)
    if server.poll() is not None: sys.exit((folder / "server.log").read_text().splitlines()[-1])
    pid_file.write_text(str(server.pid))
"""


class Machine:
    """The host's folder and what runs on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        for name, text in (("server.py", SERVER), ("control.py", CONTROL)):
            (folder / name).write_text(textwrap.dedent(text))
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: list[int] = []

    def commands(self) -> dict[str, str]:
        control = f"{sys.executable} {self.folder / 'control.py'} {self.folder} {self.port}"
        return {
            mode: f"{control} {mode} '{{draft}}' '{{steps}}' '{{top_k}}' '{{tokens}}'"
            for mode in ("generate", "extract", "none", "draft")
        }

    @property
    def pid(self) -> int:
        pid = int((self.folder / "pid").read_text())
        self.seen.append(pid)
        return pid

    @property
    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/server_info").json()
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for pid in {*machine.seen, *([machine.pid] if (tmp_path / "pid").exists() else [])}:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def host(machine: Machine, run: RunFolder, config_file: Callable[..., Path]) -> CommandHost:
    settings = {"kind": "command", "commands": machine.commands(), "ready_timeout_s": 60.0}
    config = load_config(config_file(server={"kind": "sglang", "urls": [machine.url]}, operate={"host": settings}))
    found = host_of(run, config, say=lambda _: None)
    assert isinstance(found, CommandHost)
    return found


DRAFT = Draft(Path("/exported"), DraftShape(num_steps=3, top_k=4, num_verified=8))


def test_one_host_goes_through_its_four_modes(machine: Machine, host: CommandHost) -> None:
    """Each mode is another process, the one before it gone; none leaves the processors, and the port, to the trainer."""
    pids = []
    wanted: list[tuple[Mode, dict[str, Any]]] = [
        ("generate", {}),
        ("extract", {"enable_return_aux_hidden_states": True}),
        ("none", {}),
        ("draft", {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}),
    ]
    for mode, flags in wanted:
        urls = host.enter(mode, draft=DRAFT if mode == "draft" else None)
        assert all(not is_alive(pid) for pid in pids), mode
        if mode == "none":
            assert urls == []
            with pytest.raises(httpx.ConnectError):
                httpx.get(machine.url)
            continue
        assert urls == [machine.url]
        assert is_alive(machine.pid)
        pids.append(machine.pid)
        assert machine.info == {"model_path": "/somewhere/target"} | machine.info | flags
        assert ("speculative_algorithm" in machine.info) == (mode == "draft")
    host.enter("none")
    assert not any(map(is_alive, pids))
    assert len(set(pids)) == 3


def test_a_server_killed_in_its_mode_is_started_again_by_the_next(machine: Machine, host: CommandHost) -> None:
    host.enter("generate")
    os.kill(first := machine.pid, signal.SIGKILL)
    while is_alive(first):
        time.sleep(0.01)
    with host.serving("draft", draft=DRAFT):
        assert machine.info["speculative_num_steps"] == 3
        second = machine.pid
    assert not is_alive(second), "what was started for the block ends with it"


def test_a_server_that_does_not_give_its_port_back_is_told(machine: Machine, host: CommandHost) -> None:
    """The old server ignores its end, so the new one finds its port taken: its last words are in the message."""
    host.enter("generate")
    (machine.folder / "stuck").touch()
    with pytest.raises(ServerError, match=r"mode draft ended with code 1: .*Address already in use"):
        host.enter("draft", draft=DRAFT)
    assert "speculative_algorithm" not in machine.info


def test_a_benchmark_by_restart_is_off_on_on_off_with_a_process_each(machine: Machine, host: CommandHost) -> None:
    serve, pids, drafting = sides_of(host, DRAFT.folder), [], []
    for side in ("off", "on", "on", "off"):
        with serve(side, DRAFT.shape) as urls:  # type: ignore[arg-type]
            assert urls == [machine.url]
            pids.append(machine.pid)
            drafting.append("speculative_algorithm" in machine.info)
    assert drafting == [False, True, True, False]
    assert len(set(pids)) == 4
    assert not any(map(is_alive, pids))
