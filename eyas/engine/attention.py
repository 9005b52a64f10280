"""Attention over the paged cache: one compiled pass for all decoding rows, torch's flash attention for pieces of prompts.

Decoding (and verifying) goes through `kernels`, where a row's result is the same bits whatever runs beside it and however
many rows of its request are computed at once. Prompts are cut at multiples of 64 and go through torch's flash attention
in blocks of 64 rows, whose bits do not depend on how the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eyas.engine.kernels import attend, turn
from eyas.engine.pages import PAGE, LayerCache, as_array


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
        attend(as_array(qkv), *where, *self._norms, as_array(out))
        return out

    def attend_prompt(self, qkv: Tensor, cache: LayerCache, span: PromptSpan) -> Tensor:
        """One piece of a prompt `qkv` [T, (heads + 2 kv) * D]: writes keys and values to `cache` → [T, heads * D]."""
        num_rows = qkv.shape[0]
        q = qkv.new_empty(num_rows, qkv.shape[1] - 2 * self.num_kv * self.head_dim)
        where = self.cos, self.sin, cache.keys, cache.values, span.pages, span.num_cached
        turn(as_array(qkv), *where, *self._norms, as_array(q))
        keys, values = cache.rows(span.pages, span.num_cached + num_rows)  # [kv, keys, D]
        turned = q.view(1, num_rows, -1, self.head_dim).transpose(1, 2)  # [1, heads, T, D]
        blocks = []
        for start in range(0, num_rows, PAGE):  # always the same blocks of 64: how a prompt is cut changes no bit
            stop = min(start + PAGE, num_rows)
            first, last = span.num_cached + start, span.num_cached + stop
            is_ahead = torch.arange(last)[None] > torch.arange(first, last)[:, None]
            mask = torch.zeros(is_ahead.shape, dtype=q.dtype).masked_fill_(is_ahead, -torch.inf)
            out = functional.scaled_dot_product_attention(
                turned[:, :, start:stop],
                keys[None, :, :last],
                values[None, :, :last],
                attn_mask=mask,
                scale=1.0,
                enable_gqa=True,
            )  # [1, heads, rows, D]
            blocks.append(out[0].transpose(0, 1).flatten(1))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @property
    def _norms(self) -> tuple[np.ndarray, np.ndarray, np.float32, np.float32]:
        return self.q_norm, self.k_norm, np.float32(self.eps), np.float32(self.head_dim**-0.5)
