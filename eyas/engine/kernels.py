"""What torch has no operation for, compiled by numba: rotary positions, page writes and attention in one pass; norms.

A decoding step of a small model is not bound by arithmetic but by the number of operations: with torch's own ones the attention
of a layer takes about thirty, here one. A work item is (request, key head): it turns its queries and keys, writes the page, and
attends page by page with a running softmax. A row's bits depend on its own request alone: not on what runs beside it, not on
how many rows of the request are computed at once, so verifying drafts gives the very numbers that decoding gives.

bf16 lives in arrays of uint16 (numpy has none); arithmetic is fp32. Keys lie transposed in their page, in blocks of 16 tokens,
[4, D, 16], so that scores of 16 keys are computed side by side and no more of a page is read than is filled: with many
requests the cache comes from main memory, whose speed bounds a step. D is a multiple of 8. Compiled code is kept on disk by
numba: the first start on a machine takes some 15 s longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from eyas.engine.products import LANES, add_half_product, add_product

PAGE = 64
"""Tokens of a page."""
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_ROUND_BITS = np.int32(0x4B400000)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_inner = njit(cache=True, error_model="numpy", fastmath={"contract", "nnan", "ninf", "nsz"})  # sums keep their order
_outer = njit(cache=True, error_model="numpy", nogil=True, parallel=True)


@_outer
def attend(
    qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, starts: Any, counts: Any, firsts: Any, tables: Any, writes: Any,
    q_norm: Any, k_norm: Any, eps: Any, scale: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of G groups of rows over the cache, after writing their keys and values to it unless `write` has done that.

    Rows `starts[g]` to `starts[g] + counts[g]` of `qkv` [N, (heads + 2 kv) * D] stand at positions `firsts[g]` and following of
    a request whose pages are `tables[g]` [W] int64; `writes` [G] bool. `cos`, `sin` [positions, D/2] float32; `keys`
    [pages, kv, 4, D, 16], `values` [pages, kv, 64, D]; `q_norm`, `k_norm` [D] float32, or empty; `out` [N, heads * D].
    """
    num_kv = keys.shape[1]
    for index in prange(starts.shape[0] * num_kv):
        g = index // num_kv
        _attend_item(
            starts[g], counts[g], firsts[g], tables[g], writes[g], index % num_kv, qkv, cos, sin, keys, values, q_norm, k_norm,
            eps, scale, out,
        )  # fmt: skip


@_outer
def write(
    qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, rows: Any, positions: Any, pages: Any, k_norm: Any, eps: Any
) -> None:
    """Keys and values of `rows` [M] of `qkv`, at `positions` [M], into their `pages` [M] (all int64); shapes as in `attend`."""
    for t in prange(rows.shape[0]):
        p = positions[t]
        page = pages[t]
        for h in range(keys.shape[1]):
            _write(qkv[rows[t]], h, cos[p], sin[p], k_norm, eps, keys[page], values[page], p % PAGE)


@_inner
def normalise(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """`out` = x / rms(x) * weight, row by row of `x` [N, H]; `weight` [H] float32. One thread: a barrier would cost more."""
    num_rows, width = x.shape
    row, lanes = np.empty(width, np.float32), np.empty(LANES, np.float32)
    for n in range(num_rows):
        for i in range(width):
            row[i] = as_fp32(x[n, i])
        for lane in range(LANES):
            lanes[lane] = _ZERO
        for i in range(0, width - width % LANES, LANES):
            for lane in range(LANES):
                lanes[lane] += row[i + lane] * row[i + lane]
        total = _ZERO
        for i in range(width - width % LANES, width):
            total += row[i] * row[i]
        for lane in range(LANES):
            total += lanes[lane]
        factor = _ONE / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[n, i] = _stored(row[i] * factor * weight[i], out[n, i])


def as_fp32(x):  # type: ignore[no-untyped-def]  # numba wants the names of both signatures alike, without annotations
    raise NotImplementedError("compiled only")


def _stored(x, like):  # type: ignore[no-untyped-def]
    raise NotImplementedError("compiled only")


@overload(as_fp32, inline="always")
def _as_fp32_of(x):  # type: ignore[no-untyped-def]
    """fp32 of an element of an array: of bf16 bits, or of itself."""
    if isinstance(x, types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@overload(_stored, inline="always")
def _stored_as(x, like):  # type: ignore[no-untyped-def]
    """fp32 as an array with elements such as `like` keeps it: bf16 bits, rounded to nearest, ties to even; or itself."""
    if isinstance(like, types.Integer):

        def rounded(x, like):  # type: ignore[no-untyped-def]
            bits = np.float32(x).view(np.uint32)
            return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

        return rounded
    return lambda x, like: x


@_inner
def exp_nonpositive(x: Any) -> Any:
    """exp(x) for x ≤ 0 to about 1 ulp, exactly 1 at 0 (Cephes' polynomial), without a call: loops of it become vector code."""
    x = max(x, _LOWEST)
    shifted = x * _LOG2E + _ROUND
    n = shifted - _ROUND
    f = x - n * _LN2_HIGH
    f = f - n * _LN2_LOW
    p = ((((_P0 * f + _P1) * f + _P2) * f + _P3) * f + _P4) * f + _P5
    y = p * f * f + f + _ONE
    power = np.int32(np.int32(np.float32(shifted).view(np.int32) - _ROUND_BITS) + np.int32(127)) << np.int32(23)
    return y * np.int32(power).view(np.float32)


@_inner
def _rotate(row: Any, start: int, cos: Any, sin: Any, norm: Any, eps: Any, scale: Any, into: Any) -> None:
    """`into` [D] = rotary(norm(row[start : start + D])) * scale."""
    dim, half = into.shape[0], into.shape[0] // 2
    for d in range(dim):
        into[d] = as_fp32(row[start + d])
    if norm.shape[0]:
        total = _ZERO
        for d in range(dim):
            total += into[d] * into[d]
        factor = _ONE / np.sqrt(total / np.float32(dim) + eps)
        for d in range(dim):
            into[d] = into[d] * factor * norm[d]
    for d in range(half):
        a, b = into[d], into[d + half]
        into[d] = (a * cos[d] - b * sin[d]) * scale
        into[d + half] = (b * cos[d] + a * sin[d]) * scale


@_inner
def _write(row: Any, h: int, cos: Any, sin: Any, norm: Any, eps: Any, page_keys: Any, page_values: Any, place: int) -> None:
    """Key and value of head `h` of one row into their place of a page [kv, 4, D, 16], [kv, 64, D]."""
    num_kv, dim = page_keys.shape[0], page_keys.shape[2]
    heads = row.shape[0] // dim - 2 * num_kv
    turned = np.empty(dim, np.float32)
    _rotate(row, (heads + h) * dim, cos, sin, norm, eps, _ONE, turned)
    for d in range(dim):
        page_keys[h, place // LANES, d, place % LANES] = _stored(turned[d], page_keys[h, 0, d, 0])
        page_values[h, place, d] = row[(heads + num_kv + h) * dim + d]


@_inner
def _attend_item(
    start: int, count: int, first: int, table: Any, writes: bool, h: int, qkv: Any, cos: Any, sin: Any, keys: Any, values: Any,
    q_norm: Any, k_norm: Any, eps: Any, scale: Any, out: Any,
) -> None:  # fmt: skip
    """All rows of one group under key head `h`."""
    num_kv, dim = keys.shape[1], keys.shape[3]
    heads = (qkv.shape[1] // dim - 2 * num_kv) // num_kv  # query heads of a key head
    num_rows, length = count * heads, first + count
    q, acc = np.empty((num_rows, dim), np.float32), np.zeros((num_rows, dim), np.float32)
    states = np.zeros((num_rows, 2), np.float32)  # maximum and sum
    s, lanes = np.empty((heads, PAGE), np.float32), np.empty(LANES, np.float32)
    for i in range(count):
        row, p = qkv[start + i], first + i
        if writes:
            page = table[p // PAGE]
            _write(row, h, cos[p], sin[p], k_norm, eps, keys[page], values[page], p % PAGE)
        for g in range(heads):
            _rotate(row, (h * heads + g) * dim, cos[p], sin[p], q_norm, eps, scale, q[i * heads + g])
            states[i * heads + g, 0] = _MASKED
    for w in range((length - 1) // PAGE + 1):
        page_keys, page_values = keys[table[w], h].reshape(-1, LANES), values[table[w], h]
        for i in range(count):
            num_visible = min(first + i - w * PAGE + 1, PAGE)
            if num_visible > 0:
                rows = slice(i * heads, (i + 1) * heads)
                _attend_page(q[rows], page_keys, page_values, num_visible, states[rows], acc[rows], s, lanes)
    for r in range(num_rows):
        column = (h * heads + r % heads) * dim
        share = _ONE / states[r, 1]
        for d in range(dim):
            here = start + r // heads, column + d
            out[here] = _stored(acc[r, d] * share, out[here])


@_inner
def _attend_page(q: Any, keys: Any, values: Any, num_visible: int, states: Any, acc: Any, s: Any, lanes: Any) -> None:
    """Heads of one position, `q` [heads, D], over `num_visible` tokens of a page's `keys` [4 * D, 16] and `values` [64, D].

    `states` [heads, 2] (maximum, sum) and `acc` [heads, D] are carried on; `s` [heads, 64] and `lanes` are scratch.
    """
    dim = q.shape[1]
    num_blocks = (num_visible - 1) // LANES + 1
    s[:, : num_blocks * LANES] = _ZERO
    for b in range(num_blocks):
        add_product(q, keys, b * dim, 0, dim, s, b * LANES)
    for g in range(q.shape[0]):
        _soften(s[g], num_visible, states[g], acc[g], lanes)
    for d in range(0, dim - dim % LANES, LANES):
        add_product(s, values, 0, d, num_visible, acc, d)
    if dim % LANES:
        add_half_product(s, values, 0, dim - LANES // 2, num_visible, acc, dim - LANES // 2)


@_inner
def _soften(s: Any, num_visible: int, state: Any, acc: Any, lanes: Any) -> None:
    """Scores `s` [64] of a page into weights, in place, those from `num_visible` on 0; `state` and `acc` follow the new maximum."""
    for j in range(num_visible, PAGE):
        s[j] = _MASKED
    for lane in range(LANES):
        lanes[lane] = max(max(s[lane], s[lane + LANES]), max(s[lane + 2 * LANES], s[lane + 3 * LANES]))
    top = state[0]
    for lane in range(LANES):
        top = max(top, lanes[lane])
    for j in range(PAGE):
        s[j] = exp_nonpositive(s[j] - top)
    for j in range(num_visible, PAGE):
        s[j] = _ZERO
    for lane in range(LANES):
        lanes[lane] = (s[lane] + s[lane + LANES]) + (s[lane + 2 * LANES] + s[lane + 3 * LANES])
    total = _ZERO
    for lane in range(LANES):
        total += lanes[lane]
    faded = exp_nonpositive(state[0] - top)
    state[0], state[1] = top, state[1] * faded + total
    for d in range(acc.shape[0]):
        acc[d] *= faded
