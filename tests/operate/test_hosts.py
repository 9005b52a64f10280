"""Hosts: what brings the target's servers into a mode, and what counts as being in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.config import load_config
from eyas.errors import ServerError
from eyas.operate.hosts import CommandHost, Draft, ManualHost, host_of, sides_of
from eyas.speculate.config import DraftShape
from eyas.workspace import RunFolder
from tests.operate.test_preflight import model_server

DRAFT = Draft(Path("/exported"), DraftShape(num_steps=3))
SERVER: dict[str, Any] = {"model_path": "/somewhere/target"}
DRAFTING: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/exported",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def test_commands_bring_the_host_into_a_mode_and_back(run: RunFolder, tmp_path: Path, config_file: Callable[..., Path]) -> None:
    trace = tmp_path / "trace"
    commands = {mode: f"echo {mode} {{draft}} {{steps}} {{top_k}} {{tokens}} >> {trace}" for mode in ("generate", "none", "draft")}
    with model_server(SERVER | DRAFTING) as url:
        config = load_config(
            config_file(server={"kind": "sglang", "urls": [url]}, operate={"host": {"kind": "command", "commands": commands}})
        )
        host = host_of(run, config, say=lambda text: None)
        assert isinstance(host, CommandHost)
        with host.serving("generate") as urls:
            assert urls == [url]
            assert trace.read_text().split() == ["generate"]
        with host.serving("draft", draft=DRAFT):
            pass
        with host.serving("extract") as urls:  # no command of its own: the processors are freed
            assert urls == []
    lines = [line.strip() for line in trace.read_text().splitlines()]
    assert lines == ["generate", "none", "draft /exported 3 1 4", "none", "none"]


def test_a_failed_command_is_told_with_its_output(run: RunFolder, config_file: Callable[..., Path]) -> None:
    commands = {"generate": "echo no such unit; exit 4", "none": "true"}
    config = load_config(
        config_file(
            server={"kind": "sglang", "urls": ["http://127.0.0.1:1"]}, operate={"host": {"kind": "command", "commands": commands}}
        )
    )
    with pytest.raises(ServerError, match="code 4: no such unit"), host_of(run, config, say=lambda _: None).serving("generate"):
        pass


def test_the_operator_is_told_what_to_start_and_given_time(run: RunFolder, config_file: Callable[..., Path]) -> None:
    host = {"ready_timeout_s": 0.1}
    config = load_config(config_file(server={"kind": "sglang", "urls": ["http://127.0.0.1:1"]}, operate={"host": host}))
    said: list[str] = []
    manual = host_of(run, config, say=said.append)
    assert isinstance(manual, ManualHost)
    with pytest.raises(ServerError, match="not ready within"), manual.serving("generate"):
        pass
    assert "start the servers now" in said[0]
    with manual.serving("extract") as urls:
        assert urls == []


def manual_host(run: RunFolder, config_file: Callable[..., Path], url: str, said: list[str]) -> ManualHost:
    host = {"ready_timeout_s": 240.0}
    config = load_config(config_file(server={"kind": "sglang", "urls": [url]}, operate={"host": host}))
    manual = host_of(run, config, say=said.append)
    assert isinstance(manual, ManualHost)
    return manual


def test_the_server_of_the_mode_before_is_not_taken_for_the_next(run: RunFolder, config_file: Callable[..., Path]) -> None:
    """A person restarts the server between the two sides; until then it answers, but as the wrong one."""
    answers, said = dict(SERVER), list[str]()
    with model_server(answers) as url:
        host = manual_host(run, config_file, url, said)
        changes = iter([DRAFTING, {"speculative_algorithm": None}])

        def restart(note: str) -> None:
            said.append(note)
            answers.update(next(changes))

        host = ManualHost(host.config, say=restart)
        serve = sides_of(host, DRAFT.folder)
        with serve("on", DRAFT.shape) as urls:
            assert urls == [url]
        with serve("off", DRAFT.shape) as urls:
            assert urls == [url]
    assert [note.split(": ")[0].split("mode ")[1] for note in said] == ["draft with the draft /exported (K=3)", "generate"]


def test_a_draft_in_another_shape_is_not_the_wanted_one(run: RunFolder, config_file: Callable[..., Path]) -> None:
    commands = {"generate": "true", "none": "true", "draft": "true"}
    host = {"kind": "command", "commands": commands, "ready_timeout_s": 0.1}
    with model_server(SERVER | DRAFTING | {"speculative_eagle_topk": 4}) as url:
        config = load_config(config_file(server={"kind": "sglang", "urls": [url]}, operate={"host": host}))
        wanted = r"not ready within 0 s: speculative_eagle_topk is 4, wanted 1"
        with pytest.raises(ServerError, match=wanted), host_of(run, config).serving("draft", draft=DRAFT):
            pass


def test_a_port_that_another_program_holds_is_named(run: RunFolder, config_file: Callable[..., Path]) -> None:
    """A dashboard on the server's port answers everything with 404: that is not "still starting"."""
    host = {"ready_timeout_s": 0.1}
    with model_server({}, status=404) as url:
        config = load_config(config_file(server={"kind": "sglang", "urls": [url]}, operate={"host": host}))
        with (
            pytest.raises(ServerError, match=r"BaseHTTP.* answers /model_info with 404: .* another program uses this port"),
            ManualHost(config, say=lambda _: None).serving("generate"),
        ):
            pass


def test_generation_may_use_a_server_that_drafts(run: RunFolder, config_file: Callable[..., Path]) -> None:
    """A draft changes no reply, so whoever serves with one already need not stop for the responses."""
    with model_server(SERVER | DRAFTING) as url, manual_host(run, config_file, url, []).serving("generate") as urls:
        assert urls == [url]
