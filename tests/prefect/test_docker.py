"""The compose file and the image: pinned, health-checked, secrets by file, non-root, hash-locked, SM120-safe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.config import load_config
from eyas.hidden.sources.sglang import AUX_FLAGS
from eyas.hidden.sources.sglang_plugin import FOLDER_VARIABLE
from eyas.speculate.launch import HARDWARE_FLAGS, IMAGES

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8")))


def pins(text: str) -> dict[str, str]:
    return {re.sub(r"[._-]+", "-", match[1]).lower(): match[2] for match in re.finditer(r"^([\w.-]+)==([^\s;\\]+)", text, re.M)}


def test_every_image_is_pinned_and_every_service_but_the_worker_is_health_checked() -> None:
    for name, service in compose()["services"].items():
        image = re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"])
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+[\w.-]*", image), image
        assert "healthcheck" in service or name == "worker", name


def test_passwords_and_keys_come_from_files_alone() -> None:
    document = compose()
    assert all(set(secret) == {"file"} for secret in document["secrets"].values())
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert not re.search(r"POSTGRES_PASSWORD:|API_KEY:", text)


def test_nothing_is_published_beyond_loopback() -> None:
    for service in compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_sglang_runs_as_the_benchmark_expects_on_blackwell() -> None:
    services = compose()["services"]
    draft = " ".join(services["sglang-draft"]["command"])
    for name, value in HARDWARE_FLAGS["blackwell"].items():
        assert f"--{name} {value}" in draft
    assert "--speculative-eagle-topk $${TOP_K} --speculative-num-draft-tokens $${TOKENS}" in draft
    shape = services["sglang-draft"]["environment"]
    assert (shape["STEPS"], shape["TOP_K"], shape["TOKENS"]) == ("${STEPS:-3}", "${TOP_K:-1}", "${TOKENS:-4}")
    assert all(IMAGES["blackwell"] in services[name]["image"] for name in ("sglang", "sglang-extract", "sglang-draft"))


def test_states_go_from_sglang_to_the_worker_through_one_folder() -> None:
    services = compose()["services"]
    service, config = services["sglang-extract"], load_config(ROOT / "deployments/presets/kimi-k2.5-blackwell.yaml")
    assert AUX_FLAGS in " ".join(" ".join(service["command"]).split())
    assert service["environment"][FOLDER_VARIABLE] == config.hidden.sink
    shared = next(volume for volume in service["volumes"] if volume.endswith(f":{config.hidden.sink}"))
    assert shared in services["worker"]["volumes"]
    image = (ROOT / service["build"]["dockerfile"]).read_text(encoding="utf-8")
    assert "pip install --no-cache-dir --no-deps /build" in image  # the plugin's entry point
    assert f"ARG SGLANG_IMAGE={IMAGES['blackwell']}\n" in image


def test_the_image_is_not_root_and_its_packages_are_the_locks() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "\nUSER 10001:10001\n" in dockerfile
    assert "--require-hashes --no-deps" in dockerfile
    hashed = (DOCKER / "requirements.txt").read_text(encoding="utf-8")
    locked = pins((ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8"))
    source = (DOCKER / "requirements-source.txt").read_text(encoding="utf-8")
    pinned = pins(hashed) | pins(source)
    assert pinned.items() >= locked.items(), "make the hash locks anew: see docker/README.md"
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} <= pinned.keys(), "torch's CUDA build needs them"
    blocks = re.split(r"\n(?=\S)", hashed + source)
    assert all("--hash=sha256:" in block for block in blocks if re.match(r"[\w.-]+==", block))


def test_every_service_that_computes_sees_the_gpus() -> None:
    for name, service in compose()["services"].items():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert bool(devices) is (name == "worker" or name.startswith("sglang")), name


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "docker/Dockerfile", "docker/sglang.Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml"],
    ],
)
def test_the_linters_of_images_and_of_the_compose_specification_find_nothing(command: list[str]) -> None:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_what_a_service_refers_to_is_declared(name: str) -> None:
    """What `docker compose config` resolves beyond the schema: secrets, volumes and the services that are waited for."""
    document = compose()
    service = document["services"][name]
    assert set(service.get("secrets", [])) <= document["secrets"].keys()
    volumes = [volume.partition(":")[0] for volume in service.get("volumes", [])]
    assert {volume for volume in volumes if not volume.startswith(("/", ".", "$"))} <= document["volumes"].keys()
    waits = service.get("depends_on", {})
    assert waits.keys() <= document["services"].keys()
    assert all("healthcheck" in document["services"][other] for other in waits)
