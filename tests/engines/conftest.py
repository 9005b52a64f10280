"""Real SGLang and real vLLM on this CPU, installed by `engines/install.sh`, started as child processes.

`make test-engines` installs both and names their folder with `--engines`; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.config import load_config
from eyas.operate.pipeline import open_run, run_pipeline
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

ROOT = Path(__file__).parents[2]
START_S = 900.0
SGLANG_FLAGS = shlex.split(
    "--device cpu --host 127.0.0.1 --attention-backend intel_amx --random-seed 1 --max-total-tokens 32768 "
    # On a small machine SGLang's own estimate of the share leaves nothing with chunked prefill off.
    "--mem-fraction-static 0.3 --max-running-requests 16 --context-length 2048 --enable-metrics --sleep-on-idle"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engines", default="", help="folder in which engines/install.sh put sglang and vllm")
    parser.addoption(
        "--engines-run", default="", help="finished run whose draft is measured; empty makes one with the quick preset"
    )


def engine_python(request: pytest.FixtureRequest, engine: str) -> Path:
    folder = request.config.getoption("--engines", default="")
    if not folder:
        pytest.skip("needs --engines FOLDER; `make test-engines` installs the engines and gives it")
    python = Path(folder).absolute() / engine / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{engine} is not installed in {folder}; run engines/install.sh {engine} {folder}/{engine}")
    return python


@contextlib.contextmanager
def sglang_server(python: Path, log: Path, model: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """A running SGLang server; yields its URL, ends its whole process group."""
    command = [str(python), str(ROOT / "engines/sglang/launch.py"), "--model-path", str(model), *SGLANG_FLAGS, *flags]
    with _server(command, log, "/ready", environment or {}) as url:
        yield url


@contextlib.contextmanager
def vllm_server(python: Path, log: Path, model: Path, *flags: str, environment: dict[str, str]) -> Iterator[str]:
    """A running vLLM server in bf16, not compiled; yields its URL, ends its whole process group."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "4"]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with _server(command, log, "/health", quiet | environment) as url:
        yield url


@contextlib.contextmanager
def _server(command: list[str], log: Path, ready_path: str, environment: dict[str, str]) -> Iterator[str]:
    port = free_port()
    command = [*command, "--port", str(port)]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=child_environment() | environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(f"{url}{ready_path}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start; the end of {log}:\n" + log.read_text(errors="replace")[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def child_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def target() -> TargetSpec:
    return load_target(TargetConfig())


@pytest.fixture(scope="session")
def finished_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that `--engines-run` names, otherwise a quick run made here."""
    if named := request.config.getoption("--engines-run", default=""):
        return RunFolder(Path(named))
    run = RunFolder(tmp_path_factory.mktemp("quick"))
    config = load_config(ROOT / "deployments/presets/local-smollm2-quick.yaml")
    run_pipeline(open_run(run.root, config), config)
    return run


@pytest.fixture(scope="session")
def sglang_python(request: pytest.FixtureRequest) -> Path:
    return engine_python(request, "sglang")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


RunVllm = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def vllm_generate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunVllm:
    """Run one job of `engines/vllm/generate.py` and return its result."""
    python = engine_python(request, "vllm")

    def run(job: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("vllm")
        (folder / "job.json").write_text(json.dumps(job))
        command = [str(python), str(ROOT / "engines/vllm/generate.py"), str(folder / "job.json"), str(folder / "result.json")]
        finished = subprocess.run(command, capture_output=True, text=True, env=child_environment(), start_new_session=True)
        assert finished.returncode == 0, finished.stderr[-3000:] + finished.stdout[-2000:]
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result

    return run
