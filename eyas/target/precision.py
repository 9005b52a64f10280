"""Which precision this machine computes in where the config says `auto`: decided by what its processor can do, never by a clock.

A choice by measurement falls otherwise on a busy minute, and a server that restarts in another precision is another target.
"""

from __future__ import annotations

import torch

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16")
"""Names of `torch.cpu.get_capabilities` for products of bf16 in hardware; without them bf16 is emulated, and slower than fp32."""


def native_dtype() -> str:
    """`bfloat16` on a GPU and on a CPU that multiplies bf16 in hardware, `float32` on any other."""
    if torch.cuda.is_available():
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    return "bfloat16" if any(capabilities.get(unit, False) for unit in _BF16_UNITS) else "float32"
