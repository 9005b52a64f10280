"""Attention over the paged cache through `kernels`: one pass for all decoding rows, one for each piece of a prompt.

A row's result is the same bits whatever runs beside it, however many rows of its request are computed at once, and however a
prompt is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.engine.kernels import attend, normalise, write
from eyas.engine.pages import PAGE, LayerCache, as_array

_BLOCK_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class PromptSpan:
    """Rows `start`..`stop` of a step's batch: a piece of one prompt, after `num_cached` tokens that are in `pages`."""

    start: int
    stop: int
    num_cached: int
    pages: np.ndarray  # [n] int64, all pages up to the piece's end


class DecodePlan:
    """Where B requests of Q rows each find their pages: `positions` [B, Q] int64, ascending per request."""

    def __init__(self, tables: list[list[int]], positions: np.ndarray) -> None:
        self.positions = np.ascontiguousarray(positions, dtype=np.int64)
        counts = positions[:, -1] // PAGE + 1
        self.tables = np.zeros((len(tables), int(counts.max())), dtype=np.int64)  # [B, W]
        for row, (pages, count) in enumerate(zip(tables, counts.tolist(), strict=True)):
            self.tables[row, :count] = pages[:count]


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

    def attend(self, qkv: Tensor, cache: LayerCache, plan: DecodePlan) -> Tensor:
        """Decoding rows `qkv` [B*Q, (heads + 2 kv) * D]: writes keys and values to `cache` → [B*Q, heads * D]."""
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * self.num_kv * self.head_dim)
        where = self.cos, self.sin, cache.keys, cache.values, plan.tables, plan.positions
        attend(as_array(qkv), *where, *self._norms, True, as_array(out))
        return out

    def attend_prompt(self, qkv: Tensor, cache: LayerCache, span: PromptSpan) -> Tensor:
        """One piece of a prompt `qkv` [T, (heads + 2 kv) * D]: writes keys and values to `cache` → [T, heads * D]."""
        num_rows = qkv.shape[0]
        out = qkv.new_empty(num_rows, qkv.shape[1] - 2 * self.num_kv * self.head_dim)
        rows, into = as_array(qkv), as_array(out)
        where = self.cos, self.sin, cache.keys, cache.values
        write(rows, *where, span.pages, span.num_cached, self.k_norm, np.float32(self.eps))
        even = num_rows - num_rows % _BLOCK_ROWS
        for start, stop, size in ((0, even, _BLOCK_ROWS), (even, num_rows, num_rows - even)):
            if start < stop:  # blocks of rows stand as requests beside one another, to keep every core busy
                positions = np.arange(span.num_cached + start, span.num_cached + stop).reshape(-1, size)
                tables = np.broadcast_to(span.pages, (len(positions), len(span.pages)))
                attend(rows[start:stop], *where, np.ascontiguousarray(tables), positions, *self._norms, False, into[start:stop])
        return out

    @property
    def _norms(self) -> tuple[np.ndarray, np.ndarray, np.float32, np.float32]:
        return self.q_norm, self.k_norm, np.float32(self.eps), np.float32(self.head_dim**-0.5)


class Norm:
    """RMS norm with `weight` [H]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().numpy(), np.float32(eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x / rms(x) * weight, `x` [N, H] → [N, H]; fp32 inside."""
        out = torch.empty_like(x)
        normalise(as_array(x), self._weight, self._eps, as_array(out))
        return out
