"""What a build of the image does, done here: the compose file resolved, the hash locks looked up, the pip steps executed.

torch and what its CUDA build brings along are 3 GB that only a GPU wants: they are looked up like all the others, and
left out of the pip steps, for which the torch of this environment stands in.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.prefect.test_docker import DOCKER, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

PROFILES = ("generate", "extract", "draft")
LOCKS = ("requirements.txt", "requirements-source.txt")
OF_CUDA = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
BIN = Path(sys.executable).parent


def run(command: list[str], **options: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def pinned(text: str) -> dict[str, set[str]]:
    """The packages of a lock, each with the hashes of its files."""
    packages = re.split(r"\n(?=\S)", text.strip())
    return {package.split()[0]: set(re.findall(r"--hash=(sha256:\w+)", package)) for package in packages}


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_resolves_the_file(profile: str) -> None:
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    if " version 1." in run(["docker-compose", "version"]):
        text = re.sub(r"^name: .*\n", "", text, flags=re.M)  # the first edition takes a project's name by option alone
    command = ["docker-compose", "--project-directory", str(DOCKER), "--profile", profile, "--file", "-", "config"]
    resolved = run(command, input=text)
    assert "condition: service_healthy" in resolved
    assert "http://127.0.0.1:30000/ready" in resolved


def test_every_locked_hash_is_that_of_a_file_for_the_images_python() -> None:
    """Looked up, not downloaded: what the package index states of each version that the lock names."""
    locked = pinned((DOCKER / LOCKS[0]).read_text(encoding="utf-8"))
    look = [str(BIN / "uv"), "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    image = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    stated = pinned(run([*look, *image], input="\n".join(locked)))
    assert stated.keys() == locked.keys()
    unknown = {package: hashes - stated[package] for package, hashes in locked.items() if not hashes <= stated[package]}
    assert not unknown
    assert all(locked.values()), "each has a hash"


def test_the_images_pip_steps_run_in_a_bare_environment(tmp_path: Path) -> None:
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").split("\n")
    steps = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ") and "/opt/eyas" in line]
    assert sum("pip install" in step for step in steps) == 3
    build = tmp_path / "build"
    build.mkdir()
    for lock in LOCKS:
        packages = re.split(r"\n(?=\S)", (DOCKER / lock).read_text(encoding="utf-8"))
        (build / lock).write_text("\n".join(package for package in packages if not OF_CUDA.match(package)))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, build)
    for name in ("eyas", "flows", "tasks", "blocks", "deployments"):
        shutil.copytree(ROOT / name, build / name, ignore=shutil.ignore_patterns("__pycache__"))
    here = tmp_path / "eyas"
    for step in steps:
        words = (
            step.replace("python -m venv", f"{sys.executable} -m venv")
            .replace("/opt/eyas", str(here))
            .replace("/build", str(build))
        )
        run(["/bin/sh", "-c", words])
        if "venv" in words:
            lend_torch(here)
    python = str(here / "bin" / "python")
    run([python, "-c", "import deepspeed, torch, deployments.register, eyas.draft.train, flows.pipeline"], cwd=str(tmp_path))
    assert "generate" in run([str(here / "bin" / "eyas"), "--help"], cwd=str(tmp_path))


def lend_torch(environment: Path) -> None:
    """Link this environment's torch into another one of the same Python."""
    (packages,) = environment.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).glob("*"):
        if re.match(r"(torch|torchgen|functorch)(-[\d.+a-z]+\.dist-info)?$", path.name):
            (packages / path.name).symlink_to(path)
