"""How SGLang serves the target with the draft on real hardware: one table of flags, a command and a compose file.

Written beside the benchmark for the operator; nothing here starts anything. Blackwell workstation cards
(RTX PRO 6000, SM120) have no FlashAttention-3 and no FlashMLA kernels, hence their backends below.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

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
    target: Path | str, draft: Path | str, *, hardware: str, num_draft_tokens: int, tensor_parallel: int
) -> dict[str, str]:
    """Flags of `sglang.launch_server`, without dashes; a chain (top-k 1) drafts `num_draft_tokens` and verifies one more.

    SGLang wants all three of steps, top-k and draft tokens or none; with top-k 1 the last is steps + 1.
    """
    return {
        "model-path": str(target),
        "host": "127.0.0.1",
        "port": "30000",
        **({"tensor-parallel-size": str(tensor_parallel)} if tensor_parallel > 1 else {}),
        **HARDWARE_FLAGS[hardware],
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": str(draft),
        "speculative-num-steps": str(num_draft_tokens),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(num_draft_tokens + 1),
        "enable-metrics": "",
    }


def launch_command(flags: dict[str, str]) -> str:
    """A shell script that starts the server with `flags`."""
    options = [f"  --{name} {shlex.quote(value)}" if value else f"  --{name}" for name, value in flags.items()]
    return "#!/bin/sh\nexec python -m sglang.launch_server \\\n" + " \\\n".join(options) + "\n"


def compose_file(flags: dict[str, str], *, gpus: bool) -> str:
    """A compose file with one service: host network, the two model folders mounted read-only, an ending on `/ready`."""
    mounts = [f"{flags[name]}:{flags[name]}:ro" for name in ("model-path", "speculative-draft-model-path")]
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
