"""How SGLang serves the target with the draft on real hardware: one table of flags, a command and a compose file.

Written beside the benchmark for the operator; nothing here starts anything. Blackwell workstation cards
(RTX PRO 6000, SM120) have no FlashAttention-3 and no FlashMLA kernels, hence their backends below.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from eyas.speculate.config import DraftShape

IMAGE = "lmsysorg/sglang:v0.5.23"

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


def server_flags(
    target: Path | str, draft: Path | str, *, hardware: str, shape: DraftShape, tensor_parallel: int, max_running_requests: int
) -> dict[str, str]:
    """Flags of `sglang.launch_server`, without dashes.

    SGLang wants all three of steps, top-k and draft tokens or none; with top-k 1 the last is steps + 1. It lowers
    `--max-running-requests` to 48 when it speculates, so that is always said. The draft stays in its own precision on a
    quantised target.
    """
    return {
        "model-path": str(target),
        "host": "127.0.0.1",
        "port": "30000",
        **({"tensor-parallel-size": str(tensor_parallel)} if tensor_parallel > 1 else {}),
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


def without_draft(flags: dict[str, str]) -> dict[str, str]:
    """The same server with the target alone: what the draft is compared with, and what a rollback goes back to."""
    return {name: value for name, value in flags.items() if not name.startswith("speculative-")}


def launch_command(flags: dict[str, str]) -> str:
    """A shell script that starts the server with `flags`."""
    options = [f"  --{name} {shlex.quote(value)}" if value else f"  --{name}" for name, value in flags.items()]
    return "#!/bin/sh\nexec python -m sglang.launch_server \\\n" + " \\\n".join(options) + "\n"


def compose_file(flags: dict[str, str], *, gpus: bool) -> str:
    """A compose file with one service: host network, the two model folders mounted read-only, an ending on `/ready`."""
    folders = [flags[name] for name in ("model-path", "speculative-draft-model-path") if name in flags]
    mounts = [f"{folder}:{folder}:ro" for folder in folders]
    options = [part for name, value in flags.items() for part in ([f"--{name}", value] if value else [f"--{name}"])]
    service: dict[str, Any] = {
        "image": IMAGE,
        "command": ["python3", "-m", "sglang.launch_server", *options],
        "network_mode": "host",
        "ipc": "host",
        "shm_size": "32g",
        "volumes": mounts,
        "restart": "unless-stopped",
        "healthcheck": {
            # /health generates a token and fails when merely busy, so it must not restart anything.
            "test": ["CMD", "curl", "-sf", f"http://127.0.0.1:{flags['port']}/ready"],
            "interval": "30s",
            "start_period": "60m",
        },
    }
    if gpus:
        service["deploy"] = {
            "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}
        }
    return yaml.safe_dump({"services": {"sglang": service}}, sort_keys=False)
