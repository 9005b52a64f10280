"""How the target is launched: flags, environment, a script that a shell runs, a compose file that compose accepts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.speculate.config import DraftShape
from eyas.speculate.launch import (
    ENVIRONMENT_FILE,
    HARDWARE_FLAGS,
    compose_file,
    environment_file,
    launch_command,
    listen_address,
    server_flags,
)

AWKWARD = "/m o'del $HOME:x"
"""A folder's name that a shell and compose would each read their own way."""


def flags_of(hardware: str = "blackwell", target: str = "/m", draft: str | None = "/d", **changes: Any) -> dict[str, str]:
    wanted: dict[str, Any] = {"shape": DraftShape(num_steps=3), "tensor_parallel": 1, "max_running_requests": 32} | changes
    return server_flags(target, draft, hardware=hardware, **wanted)


@pytest.mark.parametrize("hardware", sorted(HARDWARE_FLAGS))
def test_chain_flags_come_all_three_or_sglang_guesses(hardware: str) -> None:
    flags = flags_of(hardware, shape=DraftShape(num_steps=5), tensor_parallel=8)
    assert flags["speculative-num-steps"] == "5"
    assert flags["speculative-eagle-topk"] == "1"
    assert flags["speculative-num-draft-tokens"] == "6"
    assert flags["tensor-parallel-size"] == "8"


@pytest.mark.parametrize("hardware", sorted(HARDWARE_FLAGS))
def test_the_target_alone_is_the_same_server_without_a_word_of_the_draft(hardware: str) -> None:
    alone, both = flags_of(hardware, draft=None), flags_of(hardware)
    assert both.items() >= alone.items()
    assert all(name.startswith("speculative-") for name in both.keys() - alone.keys())
    assert not [name for name in alone if name.startswith("speculative-")]


def test_blackwell_workstation_cards_get_no_hopper_kernels() -> None:
    assert "fa3" not in HARDWARE_FLAGS["blackwell"].values()


def test_code_of_the_target_runs_only_where_the_config_trusts_it() -> None:
    """Kimi's tokenizer is code: without the flag SGLang ends at its start."""
    assert "trust-remote-code" not in flags_of()
    assert flags_of(trusts_remote_code=True)["trust-remote-code"] == ""


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:30000", ("127.0.0.1", 30000)),
        ("http://gpu-7.example:31000/", ("gpu-7.example", 31000)),
        ("http://[::1]:30001", ("::1", 30001)),
        ("http://10.0.0.7", ("10.0.0.7", 80)),
        ("https://target.example", ("127.0.0.1", 30000)),  # TLS ends at a proxy: SGLang itself listens behind it
    ],
)
def test_the_server_listens_where_its_url_says(url: str, address: tuple[str, int]) -> None:
    assert listen_address(url) == address
    assert (flags_of(url=url)["host"], flags_of(url=url)["port"]) == (address[0], str(address[1]))


def run_script(folder: Path, flags: dict[str, str], *, key_file: str = "") -> subprocess.CompletedProcess[str]:
    """The written script under a real shell, before a stand-in for SGLang that prints its words and its environment."""
    (folder / "launch.sh").write_text(launch_command(flags, key_file=key_file))
    (folder / ENVIRONMENT_FILE).write_text(environment_file("blackwell", tensor_parallel=2))
    (folder / "sglang").mkdir()
    (folder / "sglang" / "launch_server.py").write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(folder)}
    return subprocess.run(["sh", str(folder / "launch.sh")], env=environment, cwd="/", capture_output=True, text=True, timeout=120)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_script_starts_the_server_with_its_words_environment_and_key(tmp_path: Path) -> None:
    key = tmp_path / "the $key"
    key.write_text("secret\n")
    flags = flags_of(target=AWKWARD, url=f"http://127.0.0.1:{free_port()}")
    done = run_script(tmp_path, flags, key_file=str(key))
    words, environment = json.loads(done.stdout)
    assert words[words.index("--model-path") + 1] == AWKWARD
    assert "--enable-metrics" in words
    assert words[words.index("--api-key") + 1] == "secret"
    assert "secret" not in (tmp_path / "launch.sh").read_text()
    assert (environment["HF_HUB_OFFLINE"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "0,1")


def test_a_port_in_use_is_told_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_script(tmp_path, flags_of(url=f"http://127.0.0.1:{port}"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): stop what uses it" in done.stderr


def test_the_cpu_gets_no_cuda_and_the_engine_of_the_cpu() -> None:
    assert environment_file("cpu", tensor_parallel=1) == "HF_HUB_OFFLINE=1\nSGLANG_USE_CPU_ENGINE=1\n"


def test_compose_mounts_both_models_and_asks_ready_not_health() -> None:
    service = yaml.safe_load(compose_file(flags_of("hopper", url="http://0.0.0.0:31000"), hardware="hopper"))["services"]["sglang"]
    assert [(volume["source"], volume["read_only"]) for volume in service["volumes"]] == [("/m", True), ("/d", True)]
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:31000/ready"
    assert service["env_file"] == [ENVIRONMENT_FILE]
    assert "--model-path /m --host 0.0.0.0 --port 31000" in service["command"][0]


@pytest.mark.e2e
@pytest.mark.parametrize("hardware", sorted(HARDWARE_FLAGS))
def test_compose_itself_reads_what_was_meant(tmp_path: Path, hardware: str) -> None:
    """Through `docker-compose config`: every key known, every variable resolved, `$` in a path still a dollar sign."""
    target = tmp_path / AWKWARD.removeprefix("/")
    target.mkdir()
    key = tmp_path / "key"
    key.write_text("secret")
    text = compose_file(flags_of(hardware, target=str(target)), hardware=hardware, key_file=str(key))
    (tmp_path / "compose.yaml").write_text(text)
    (tmp_path / ENVIRONMENT_FILE).write_text(environment_file(hardware, tensor_parallel=2))
    program = shutil.which("docker-compose")
    assert program, "install docker-compose (Debian: apt-get install docker-compose)"
    done = subprocess.run(
        [program, "--file", "compose.yaml", "config"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": "/nowhere"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "variable is not set" not in done.stderr
    service = yaml.safe_load(done.stdout)["services"]["sglang"]
    assert service["environment"]["HF_HUB_OFFLINE"] == "1"
    # What compose would hand to the shell; its own output escapes the dollars again.
    script = service["command"][0].replace("$$", "$").replace("exec python3 -m sglang.launch_server", "printf '%s\\n'")
    script = script.replace("/run/secrets/sglang_api_key", str(key))
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    assert words[words.index("--model-path") + 1] == str(target)
    assert words[words.index("--api-key") + 1] == "secret"
    assert service["volumes"][0]["source"].replace("$$", "$") == str(target)
