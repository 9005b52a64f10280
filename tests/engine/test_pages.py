"""The pool of pages: what it holds in memory before anything is written to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.engine.pages import PAGE, PagePool


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_takes_memory_for_pages_that_are_used(dtype: torch.dtype) -> None:
    """A benchmark serves the target twice, with the draft and without, each with a pool for the long phases' requests."""
    page_bytes = 2 * 2 * 3 * PAGE * 64 * dtype.itemsize
    num_pages = 400_000_000 // page_bytes
    before = resident_bytes()
    pool = PagePool(kv_heads=[3, 3], num_pages=num_pages, head_dim=64, dtype=dtype)
    assert resident_bytes() - before < 40_000_000
    for page in pool.take(num_pages // 2):
        for layer in pool.layers:
            layer.keys[page] = 1
            layer.values[page] = 1
    assert resident_bytes() - before > 190_000_000
    assert not np.any(pool.layers[0].keys[num_pages - 1])
