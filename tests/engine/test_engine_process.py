"""The engine as a child: clean ends, clear refusals, no orphans, scripted reasoning."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from eyas.engine.config import EngineConfig
from eyas.engine.keeper import Keeper
from eyas.engine.process import EngineProcess
from eyas.errors import ConfigError
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from tests.engine.conftest import add_tokenizer, save_draft, save_target

ENGINE = EngineConfig(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_target(tmp_path_factory.mktemp("process"), vocab_size=259)
    add_tokenizer(folder)
    return folder


def test_a_draft_server_reports_its_flags_and_counts_and_ends_cleanly(folder: Path, tmp_path: Path) -> None:
    draft = save_draft(tmp_path / "draft", load_target(TargetConfig(model=str(folder))), draft_vocab_size=128)
    with EngineProcess(folder, config=ENGINE, draft_dir=draft, num_draft_tokens=2, log=tmp_path / "log") as process:
        params = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": params}
        meta = httpx.post(f"{process.url}/generate", json=body, timeout=240, trust_env=False).json()["meta_info"]
        info = httpx.get(f"{process.url}/server_info", trust_env=False).json()
        child = psutil.Process(process.pid)
    assert meta["spec_num_proposed_drafts"] == 2 * meta["spec_verify_ct"]
    assert meta["spec_accept_length"] == 9 / meta["spec_verify_ct"]
    assert meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] in (8, 9)
    assert info["speculative_algorithm"] == "EAGLE3"
    assert (info["speculative_num_steps"], info["speculative_eagle_topk"], info["speculative_num_draft_tokens"]) == (2, 1, 3)
    assert not child.is_running()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_scripted_replies_think_and_are_named_as_scripted(folder: Path) -> None:
    with EngineProcess(folder, config=ENGINE, is_scripted=True) as process:
        params = {"temperature": 0, "max_new_tokens": 900}

        def reply(text: str) -> dict:  # type: ignore[type-arg]
            body = {"text": text, "sampling_params": params}
            return httpx.post(f"{process.url}/generate", json=body, timeout=240, trust_env=False).json()  # type: ignore[no-any-return]

        closed, opened = reply("question"), reply("question<think>\n")
        assert httpx.get(f"{process.url}/server_info", trust_env=False).json()["scripted_reasoning"] is True
    assert closed["text"].startswith("<think>\n")
    assert "<think>" not in opened["text"]
    for answer in (closed, opened):
        assert answer["text"].count("</think>\n\n") == 1
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert answer["output_ids"][-1] == 2


def test_the_engine_dies_with_a_killed_parent(folder: Path, tmp_path: Path) -> None:
    script = f"""
import time
from eyas.engine.config import EngineConfig
from eyas.engine.keeper import Keeper
from eyas.engine.process import EngineProcess
with EngineProcess({str(folder)!r}, config=EngineConfig(dtype="float32", threads=1)) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 240
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.05)


def test_an_engine_that_dies_comes_back_on_its_port_until_it_is_no_longer_kept(folder: Path, tmp_path: Path) -> None:
    with EngineProcess(folder, config=ENGINE, log=tmp_path / "log") as process:
        keeper, first = Keeper(process), process.pid
        psutil.Process(first).kill()
        deadline = time.monotonic() + 240
        while process.pid == first or not answers(process.url):
            assert time.monotonic() < deadline, "nobody started it again"
            time.sleep(0.05)
        keeper.stop()
        last = process.pid
        psutil.Process(last).kill()
        while process.is_alive:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # twice as long as the keeper sleeps between two looks
        assert process.pid == last


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=240, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_model_that_cannot_be_served_is_a_config_error_with_the_servers_own_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder") as caught, EngineProcess(tmp_path / "nothing", config=ENGINE):
        pass
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_refused_before_anything_starts(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"), EngineProcess(folder, config=EngineConfig(port=port)):
            pass
