"""Which precision trains fastest on this machine, by measurement of one matrix product of the draft's size."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F  # noqa: N812

ROWS = 512
REPEATS = 5


def fastest_dtype(hidden_size: int) -> str:
    """`bfloat16` where its product beats fp32's by a quarter or more (CPUs without bf16 units are slower with it)."""
    if torch.cuda.is_available():
        return "bfloat16"
    seconds = {dtype: _seconds(hidden_size, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return "bfloat16" if seconds[torch.bfloat16] * 1.25 < seconds[torch.float32] else "float32"


def _seconds(hidden_size: int, dtype: torch.dtype) -> float:
    x, weight = torch.ones(ROWS, hidden_size, dtype=dtype), torch.ones(4 * hidden_size, hidden_size, dtype=dtype)
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        F.linear(x, weight)
        times.append(time.perf_counter() - begun)
    return min(times[1:])
