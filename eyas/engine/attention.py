"""Attention over the paged cache through `kernels`: decoding rows and pieces of prompts in one pass.

A row's result is the same bits whatever runs beside it, however many rows of its request are computed at once, and however a
prompt is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch import Tensor

from eyas.engine.kernels import attend, normalise, write
from eyas.engine.pages import PAGE, LayerCache, as_array

_BLOCK_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows `start`..`stop` of a step's batch: tokens of one request from position `first` on, and its `pages`."""

    start: int
    stop: int
    first: int
    pages: Sequence[int]


class AttentionPlan:
    """What `kernels` must know of a step, the same for every layer: G groups of rows, each of one request.

    A decoding request is one group and writes its own keys and values. A prompt's piece is cut into groups of 16 rows, to keep
    every core busy, and is written before any of them attends. Groups are dealt to the threads by cost, the costliest first.
    """

    def __init__(self, decoding: Sequence[Rows], prompts: Sequence[Rows]) -> None:
        blocks = [
            (start, min(_BLOCK_ROWS, rows.stop - start), rows.first + start - rows.start, rows.pages)
            for rows in prompts
            for start in range(rows.start, rows.stop, _BLOCK_ROWS)
        ]
        groups = [(rows.start, rows.stop - rows.start, rows.first, rows.pages) for rows in decoding] + blocks
        starts, counts, firsts = (np.array([group[i] for group in groups], dtype=np.int64) for i in range(3))
        num_pages = (firsts + counts - 1) // PAGE + 1
        tables = np.zeros((len(groups), int(num_pages.max(initial=1))), dtype=np.int64)
        for table, count, group in zip(tables, num_pages.tolist(), groups, strict=True):
            table[:count] = group[3][:count]
        costliest = np.argsort(-num_pages * (2 + counts), kind="stable")  # a page is loaded once, then read by every row
        threads = numba.get_num_threads()
        order = np.concatenate([costliest[thread::threads] for thread in range(threads)])
        self.starts, self.counts, self.firsts, self.tables = starts[order], counts[order], firsts[order], tables[order]
        self.writes = order < len(decoding)
        none = np.zeros(0, dtype=np.int64)
        places = [np.arange(rows.first, rows.first + rows.stop - rows.start) for rows in prompts]
        pages = [np.array(rows.pages, dtype=np.int64)[place // PAGE] for rows, place in zip(prompts, places, strict=True)]
        self.prompt_rows = np.concatenate([none, *(np.arange(rows.start, rows.stop) for rows in prompts)])
        self.prompt_positions, self.prompt_pages = np.concatenate([none, *places]), np.concatenate([none, *pages])


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of one layer's attention, its rotary tables [positions, D/2] float32 and norms of q and k [D] float32 or empty."""

    num_kv: int
    head_dim: int
    cos: np.ndarray
    sin: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    eps: float

    def attend(self, qkv: Tensor, cache: LayerCache, plan: AttentionPlan) -> Tensor:
        """Rows `qkv` [N, (heads + 2 kv) * D] of the step of `plan`: writes keys and values to `cache` → [N, heads * D]."""
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * self.num_kv * self.head_dim)
        rows, eps, scale = as_array(qkv), np.float32(self.eps), np.float32(self.head_dim**-0.5)
        where = self.cos, self.sin, cache.keys, cache.values
        if len(plan.prompt_rows):
            write(rows, *where, plan.prompt_rows, plan.prompt_positions, plan.prompt_pages, self.k_norm, eps)
        groups = plan.starts, plan.counts, plan.firsts, plan.tables, plan.writes
        attend(rows, *where, *groups, self.q_norm, self.k_norm, eps, scale, as_array(out))
        return out


class Norm:
    """RMS norm with `weight` [H]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().numpy(), np.float32(eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight, `x` [N, H] → [N, H]; fp32 inside."""
        out = torch.empty_like(x)
        normalise(as_array(x), self._weight, self._eps, as_array(out))
        return out
