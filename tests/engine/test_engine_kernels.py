"""The compiled kernels against plain formulas in float64, and the bits they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.engine.attention import AttentionPlan, Heads, Norm, Rows
from eyas.engine.linear import Linear
from eyas.engine.model import check_supported
from eyas.engine.pages import LayerCache
from eyas.errors import ConfigError
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from tests.engine.conftest import SIZES, save_target

HEADS, NUM_KV, DIM = 6, 2, 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def make_heads() -> Heads:
    angles = torch.arange(400)[:, None] / 100.0 ** (torch.arange(DIM // 2) / (DIM // 2))
    none = np.empty(0, np.float32)
    return Heads(
        num_kv=NUM_KV, head_dim=DIM, cos=angles.cos().numpy(), sin=angles.sin().numpy(), q_norm=none, k_norm=none, eps=1e-5
    )


def rows_of(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(count, (HEADS + 2 * NUM_KV) * DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slow_attention(qkv: Tensor, heads: Heads) -> Tensor:
    """Causal attention of one request from position 0, in float64, one row and head at a time."""
    x = qkv.double().view(len(qkv), -1, DIM)
    cos, sin = torch.from_numpy(heads.cos[: len(qkv)]).double(), torch.from_numpy(heads.sin[: len(qkv)]).double()
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    turned = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
    out = torch.empty(len(qkv), HEADS, DIM, dtype=torch.float64)
    for t in range(len(qkv)):
        for head in range(HEADS):
            key = HEADS + head // (HEADS // NUM_KV)
            weights = (turned[: t + 1, key] @ turned[t, head] / DIM**0.5).softmax(0)
            out[t, head] = weights @ x[: t + 1, key + NUM_KV]
    return out.flatten(1)


def prompt_through(qkv: Tensor, pages: list[int], cuts: list[int], cache: LayerCache) -> Tensor:
    """The rows of one prompt through the cache, cut before each position of `cuts`."""
    heads, parts = make_heads(), []
    for first, last in zip([0, *cuts], [*cuts, len(qkv)], strict=True):
        piece = Rows(start=0, stop=last - first, first=first, pages=pages)
        parts.append(heads.attend(qkv[first:last], cache, AttentionPlan([], [piece])))
    return torch.cat(parts)


def new_cache(dtype: torch.dtype) -> LayerCache:
    return LayerCache(12, NUM_KV, DIM, dtype)


@DTYPES
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_attention_over_scattered_pages_equals_the_plain_formula(length: int, dtype: torch.dtype) -> None:
    qkv = rows_of(length, dtype)
    ours = prompt_through(qkv, [7, 2, 9], [], new_cache(dtype))
    bounds = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(ours.double(), slow_attention(qkv, make_heads()), **bounds)


@DTYPES
def test_a_cut_changes_no_bit_of_a_prompt(dtype: torch.dtype) -> None:
    qkv = rows_of(300, dtype)
    whole = prompt_through(qkv, [0, 1, 2, 3, 4], [], new_cache(dtype))
    for cuts in ([64], [64, 128, 192, 256], [1, 2, 77, 299]):
        assert torch.equal(whole, prompt_through(qkv, [5, 9, 6, 8, 7], cuts, new_cache(dtype))), cuts


@DTYPES
def test_verifying_rows_gives_the_bits_of_decoding_them_one_by_one_whatever_runs_beside(dtype: torch.dtype) -> None:
    heads, prompt, rows, other = make_heads(), rows_of(62, dtype), rows_of(4, dtype, 1), rows_of(4, dtype, 2)
    together, single = new_cache(dtype), new_cache(dtype)
    for cache in (together, single):
        prompt_through(prompt, [3, 4], [], cache)
    beside = [Rows(start=4, stop=8, first=0, pages=[8])]
    piece = [Rows(start=8, stop=30, first=0, pages=[6])]
    mine = Rows(start=0, stop=4, first=62, pages=[3, 4])
    verified = heads.attend(torch.cat([rows, other, rows_of(22, dtype, 3)]), together, AttentionPlan([mine, *beside], piece))
    plans = [AttentionPlan([Rows(start=0, stop=1, first=62 + i, pages=[3, 4])], []) for i in range(4)]
    one_by_one = [heads.attend(rows[i : i + 1], single, plan) for i, plan in enumerate(plans)]
    assert torch.equal(verified[:4], torch.cat(one_by_one))
    alone = prompt_through(rows_of(22, dtype, 3), [2], [], new_cache(dtype))
    assert torch.equal(verified[8:], alone)


@DTYPES
@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576)])
def test_a_row_of_a_product_has_the_same_bits_alone_as_among_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out, width = shape
    linear = Linear((torch.randn(out, width, generator=generator) * 0.05).to(dtype))
    x, other = torch.randn(9, width, generator=generator).to(dtype), torch.randn(9, out, generator=generator).to(dtype)
    for product in (linear, linear.silu, lambda x: linear.times(x, other[: len(x)]), lambda x: linear.plus(x, other[: len(x)])):
        among = product(x)
        assert all(torch.equal(product(x[:count].contiguous()), among[:count]) for count in (1, 2, 4))


@DTYPES
@pytest.mark.parametrize("width", [8, 48, 576])
def test_norm_equals_the_plain_formula(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype)
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    bounds = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 5e-3}
    torch.testing.assert_close(Norm(weight, 1e-5)(x).double(), wanted, **bounds)


def test_heads_that_the_kernels_would_overrun_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "head_dim", 12)
    spec = load_target(TargetConfig(model=str(save_target(tmp_path))))
    with pytest.raises(ConfigError, match="head_dim of 12"):
        check_supported(spec)
