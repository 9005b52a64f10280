"""Which precision this machine computes a forward pass fastest in, by measuring one."""

from __future__ import annotations

import time

import torch

_ROWS, _WIDTH = 512, 768


def fastest_dtype() -> str:
    """`bfloat16` or `float32`: on a GPU always the first; on a CPU whichever multiplies faster (older ones emulate bf16)."""
    if torch.cuda.is_available():
        return "bfloat16"
    return "bfloat16" if _seconds(torch.bfloat16) < _seconds(torch.float32) else "float32"


def _seconds(dtype: torch.dtype) -> float:
    left = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    right = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - start)
    return best
