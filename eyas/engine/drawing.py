"""From logits to tokens: filtered probabilities and draws, compiled by numba, a row at a time.

A draw is an inverse-CDF look-up with one uniform number made from (seed, position) alone, so a seeded reply depends on nothing
but its own logits. A row's weights stay in the processor's cache from the first pass to the look-up; with torch's operations over
[N, V], each a pass through memory, sampling took a fifth of a step of 128 requests (V = 49,152).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from eyas.engine.kernels import as_fp32, exp_nonpositive
from eyas.engine.pages import as_array
from eyas.engine.sampling import SamplingParams

_LANES = 16
_BLOCK = 256
_LOWEST = np.float32(-86.0)
_ZERO = np.float32(0.0)
_FIRST_CUT, _NEXT_CUT, _LAST_CUT = np.float32(1e-3), np.float32(1 / 64), np.float32(1e-36)
_inner = njit(cache=True, error_model="numpy", fastmath={"contract"})  # infinities are values here, sums keep their order
_outer = njit(cache=True, error_model="numpy", nogil=True, parallel=True)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone (splitmix64, 53 bits)."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / 9007199254740992.0


def sample(logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """A token of each of `rows` of `logits` [N, V] (bf16 or fp32) under its own `params` (T > 0) and number in [0, 1)."""
    tokens = np.empty(len(rows), np.int64)
    _sample(as_array(logits), np.array(rows, np.int64), *_columns(params), np.array(uniforms, np.float64), tokens)
    return list(tokens.tolist())


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [N, V] fp32 of `logits` [N, V] under each row's temperature, top-k, top-p and min-p (T > 0).

    As in SGLang, top-p measures the mass before top-k cuts it; the rows sum to 1. Of equals the lower id comes first.
    """
    probs = torch.empty(logits.shape, dtype=torch.float32)
    _probabilities(as_array(logits), *_columns(params), as_array(probs))
    return probs


def draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Token ids [N] drawn from `weights` [N, V] fp32 (any positive scale), never one of weight 0."""
    tokens = torch.empty(len(weights), dtype=torch.int64)
    _draw(as_array(weights.contiguous()), np.array(uniforms, np.float64), as_array(tokens))
    return tokens


def _columns(params: Sequence[SamplingParams]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([row.temperature for row in params], np.float32),
        np.array([row.top_p for row in params], np.float64),
        np.array([row.top_k for row in params], np.int64),
        np.array([row.min_p for row in params], np.float32),
    )


@_outer
def _sample(
    logits: Any, rows: Any, temperatures: Any, top_ps: Any, top_ks: Any, min_ps: Any, uniforms: Any, tokens: Any
) -> None:  # fmt: skip
    for n in prange(rows.shape[0]):
        weights = np.empty(logits.shape[1], np.float32)
        mass = _weigh(logits[rows[n]], temperatures[n], top_ps[n], top_ks[n], min_ps[n], weights)
        tokens[n] = _look_up(weights, uniforms[n] * mass)


@_outer
def _probabilities(logits: Any, temperatures: Any, top_ps: Any, top_ks: Any, min_ps: Any, probs: Any) -> None:
    for n in prange(logits.shape[0]):
        mass = _weigh(logits[n], temperatures[n], top_ps[n], top_ks[n], min_ps[n], probs[n])
        for i in range(probs.shape[1]):
            probs[n, i] /= np.float32(mass)


@_outer
def _draw(weights: Any, uniforms: Any, tokens: Any) -> None:
    for n in prange(weights.shape[0]):
        mass = 0.0
        for start in range(0, weights.shape[1], _BLOCK):
            mass += _block_mass(weights[n], start)
        tokens[n] = _look_up(weights[n], uniforms[n] * mass)


@_inner
def _weigh(row: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, into: Any) -> Any:
    """`into` [V] = exp((row - max) / temperature) where the filters keep it, else 0; returns its sum in fp64."""
    size = row.shape[0]
    lanes = np.full(_LANES, -np.inf, np.float32)
    whole = size - size % _LANES
    for i in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] = max(lanes[lane], as_fp32(row[i + lane]))
    top = lanes.max()
    for i in range(whole, size):
        top = max(top, as_fp32(row[i]))
    scale = np.float32(1.0) / temperature
    for i in range(size):
        x = (as_fp32(row[i]) - top) * scale
        into[i] = exp_nonpositive(x) if x > _LOWEST else _ZERO
    mass = 0.0
    for start in range(0, size, _BLOCK):
        mass += _block_mass(into, start)
    if top_p >= 1 and top_k <= 0 and min_p <= 0:
        return mass
    return _filter(into, top_p * mass if top_p < 1 else np.inf, top_k if top_k > 0 else size, min_p)


@_inner
def _filter(weights: Any, top_mass: Any, top_k: Any, min_weight: Any) -> Any:
    """Keep the greatest of `weights` (the greatest is 1) while the mass before is below `top_mass`; returns the kept mass."""
    cut, ids = _FIRST_CUT, np.empty(weights.shape[0], np.int32)
    while True:  # only what lies above a cut is sorted; most rows need no second one
        cut = max(cut, min_weight)
        count, mass = 0, 0.0
        for i in range(weights.shape[0]):
            ids[count] = i
            count += weights[i] >= cut
        for place in range(count):
            mass += weights[ids[place]]
        if mass >= top_mass or count >= top_k or cut <= min_weight or cut < _LAST_CUT:
            break
        cut *= _NEXT_CUT
    values = np.empty(count, np.float32)
    for place in range(count):
        values[place] = weights[ids[place]]
    weights[:] = _ZERO
    order = np.argsort(-values, kind="mergesort")
    before = 0.0
    for rank in range(min(top_k, count)):
        if before >= top_mass:
            break
        weights[ids[order[rank]]] = values[order[rank]]
        before += values[order[rank]]
    return before


@_inner
def _block_mass(weights: Any, start: Any) -> Any:
    """Sum of the `_BLOCK` weights from `start` on, in an order of its own."""
    stop = min(start + _BLOCK, weights.shape[0])
    lanes = np.zeros(_LANES, np.float32)
    whole = start + (stop - start) // _LANES * _LANES
    for i in range(start, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] += weights[i + lane]
    mass = 0.0
    for lane in range(_LANES):
        mass += lanes[lane]
    for i in range(whole, stop):
        mass += weights[i]
    return mass


@_inner
def _look_up(weights: Any, wanted: Any) -> Any:
    """The id at which the running sum of `weights` passes `wanted`; rounding never leads to an id of weight 0."""
    block, left = 0, wanted
    for start in range(0, weights.shape[0], _BLOCK):
        mass = _block_mass(weights, start)
        if mass > 0:
            block, left = start, wanted
            if wanted < mass:
                break
            wanted -= mass
    last = block
    for i in range(block, min(block + _BLOCK, weights.shape[0])):
        if weights[i] > 0:
            last = i
            if left < weights[i]:
                break
            left -= weights[i]
    return last
