from __future__ import annotations

import subprocess

import pytest
import yaml

from eyas.speculate.config import DraftShape
from eyas.speculate.launch import HARDWARE_FLAGS, compose_file, launch_command, server_flags


@pytest.mark.parametrize("hardware", sorted(HARDWARE_FLAGS))
def test_chain_flags_come_all_three_or_sglang_guesses(hardware: str) -> None:
    flags = server_flags("/m", "/d", hardware=hardware, shape=DraftShape(num_steps=5), tensor_parallel=8, max_running_requests=32)
    assert flags["speculative-num-steps"] == "5"
    assert flags["speculative-eagle-topk"] == "1"
    assert flags["speculative-num-draft-tokens"] == "6"
    assert flags["tensor-parallel-size"] == "8"


def test_command_survives_a_shell_with_awkward_paths() -> None:
    flags = server_flags(
        "/m o'del", "/d", hardware="blackwell", shape=DraftShape(num_steps=3), tensor_parallel=1, max_running_requests=32
    )
    script = launch_command(flags).replace("exec python -m sglang.launch_server", "printf '%s\\n'")
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split("\n")
    assert words[words.index("--model-path") + 1] == "/m o'del"
    assert "--enable-metrics" in words


def test_blackwell_workstation_cards_get_no_hopper_kernels() -> None:
    assert "fa3" not in HARDWARE_FLAGS["blackwell"].values()


def test_compose_mounts_both_models_and_asks_ready_not_health() -> None:
    flags = server_flags("/m", "/d", hardware="hopper", shape=DraftShape(num_steps=3), tensor_parallel=1, max_running_requests=32)
    service = yaml.safe_load(compose_file(flags, gpus=True))["services"]["sglang"]
    assert service["volumes"] == ["/m:/m:ro", "/d:/d:ro"]
    assert service["healthcheck"]["test"][-1].endswith("/ready")
    assert service["command"][3:5] == ["--model-path", "/m"]
