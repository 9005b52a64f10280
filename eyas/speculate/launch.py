"""How SGLang serves the target with the draft on real hardware: one table of flags and environment, a command, a compose file.

Written beside the benchmark for the operator; nothing here starts anything. Blackwell workstation cards
(RTX PRO 6000, SM120) have no FlashAttention-3 and no FlashMLA kernels, hence their backends below.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from eyas.speculate.config import DraftShape

IMAGES = {"blackwell": "lmsysorg/sglang:v0.5.23", "hopper": "lmsysorg/sglang:v0.5.23", "cpu": "sglang-cpu:v0.5.23"}
"""SGLang publishes no image for the CPU: `sglang-cpu` is what its `docker/xeon.Dockerfile` builds."""

HARDWARE_FLAGS: dict[str, dict[str, str]] = {
    "blackwell": {
        "attention-backend": "triton",
        "speculative-draft-attention-backend": "triton",
        "sampling-backend": "flashinfer",
        "mem-fraction-static": "0.85",
    },
    "hopper": {
        "attention-backend": "fa3",
        "speculative-draft-attention-backend": "fa3",
        "mem-fraction-static": "0.85",
    },
    "cpu": {"device": "cpu", "attention-backend": "intel_amx", "dtype": "bfloat16"},
}

ENVIRONMENT_FILE = "launch.env"
DEFAULT_URL = "http://127.0.0.1:30000"
_KEY_IN_CONTAINER = "/run/secrets/sglang_api_key"

# SGLang itself loads the weights for minutes before it finds its port taken.
_PORT_CHECK = """\
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    listener.bind((host, port))
except OSError as error:
    sys.exit(f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or name another in server.urls")
"""


def server_flags(
    target: Path | str,
    draft: Path | str | None,
    *,
    hardware: str,
    shape: DraftShape,
    tensor_parallel: int,
    max_running_requests: int,
    url: str = DEFAULT_URL,
    trusts_remote_code: bool = False,
) -> dict[str, str]:
    """Flags of `sglang.launch_server`, without dashes, that serve the target at `url`; without a draft where that is None.

    SGLang wants all three of steps, top-k and draft tokens or none; with top-k 1 the last is steps + 1. It lowers
    `--max-running-requests` to 48 when it speculates, so that is always said. The draft stays in its own precision on a
    quantised target.
    """
    host, port = listen_address(url)
    flags = {
        "model-path": str(target),
        "host": host,
        "port": str(port),
        **({"tensor-parallel-size": str(tensor_parallel)} if tensor_parallel > 1 else {}),
        **({"trust-remote-code": ""} if trusts_remote_code else {}),
        **HARDWARE_FLAGS[hardware],
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(draft),
        "speculative-draft-model-quantization": "unquant",
        "speculative-num-steps": str(shape.num_steps),
        "speculative-eagle-topk": str(shape.top_k),
        "speculative-num-draft-tokens": str(shape.verified),
        "max-running-requests": str(max_running_requests),
        "enable-metrics": "",
    }
    return {name: value for name, value in flags.items() if draft is not None or not name.startswith("speculative-")}


def listen_address(url: str) -> tuple[str, int]:
    """Host and port that a server behind `url` listens on; SGLang speaks no TLS, so behind https a proxy stands before it."""
    parts = urlsplit(url)
    return listen_address(DEFAULT_URL) if parts.scheme == "https" else (str(parts.hostname), parts.port or 80)


def environment_file(hardware: str, *, tensor_parallel: int) -> str:
    """`launch.env`, read by the shell script and by compose alike: one NAME=value per line, nothing quoted."""
    own = (
        {"SGLANG_USE_CPU_ENGINE": "1"}
        if hardware == "cpu"
        else {"CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(tensor_parallel))}
    )
    # Both folders are on this disk: nothing is to be fetched, and nothing to be waited for where no network is.
    return "".join(f"{name}={value}\n" for name, value in {"HF_HUB_OFFLINE": "1", **own}.items())


def launch_command(flags: dict[str, str], *, key_file: str = "") -> str:
    """A shell script that starts the server with `flags` and the environment beside it; exit code 2 for a port in use."""
    lines = [
        "#!/bin/sh",
        "set -eu",
        f'set -a; . "$(dirname "$0")/{ENVIRONMENT_FILE}"; set +a',
        f"python3 -c {shlex.quote(_PORT_CHECK)} {shlex.quote(flags['host'])} {flags['port']} || exit 2",
        "exec python3 -m sglang.launch_server \\",
        " \\\n".join(f"  {option}" for option in _options(flags, shlex.quote(key_file) if key_file else "")),
    ]
    return "\n".join(lines) + "\n"


def compose_file(flags: dict[str, str], *, hardware: str, key_file: str = "") -> str:
    """A compose file with one service: host network, the model folders mounted read-only, an eye on `/ready` alone."""
    folders = [flags[name] for name in ("model-path", "speculative-draft-model-path") if name in flags]
    options = _options(flags, _KEY_IN_CONTAINER if key_file else "")
    service: dict[str, Any] = {
        "image": IMAGES[hardware],
        "entrypoint": ["/bin/sh", "-c"],
        "command": [" ".join(["exec python3 -m sglang.launch_server", *options])],
        "env_file": [ENVIRONMENT_FILE],
        "network_mode": "host",
        "ipc": "host",
        "shm_size": "32g",
        "volumes": [{"type": "bind", "source": folder, "target": folder, "read_only": True} for folder in folders],
        "restart": "unless-stopped",
        "healthcheck": {
            # /health generates a token and fails when merely busy, so it must not restart anything.
            "test": ["CMD", "curl", "-sf", f"http://{_reached(flags['host'])}:{flags['port']}/ready"],
            "interval": "30s",
            "start_period": "60m",
        },
    }
    document: dict[str, Any] = {"services": {"sglang": service}}
    if key_file:
        service["secrets"] = ["sglang_api_key"]
        document["secrets"] = {"sglang_api_key": {"file": key_file}}
    if hardware != "cpu":
        service["deploy"] = {
            "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}
        }
    return yaml.safe_dump(_escaped(document), sort_keys=False)


def _options(flags: dict[str, str], key_path: str) -> list[str]:
    """Words for a shell; the key is read from its file when the server starts, so that no written file holds it."""
    options = [f"--{name} {shlex.quote(value)}" if value else f"--{name}" for name, value in flags.items()]
    return [*options, *([f'--api-key "$(cat {key_path})"'] if key_path else [])]


def _reached(host: str) -> str:
    """The address at which the machine itself reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _escaped(value: Any) -> Any:
    """Compose replaces `$NAME` by a variable everywhere; `$$` is a dollar sign."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
