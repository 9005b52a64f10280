"""Unroll attention of the training-time test, without the S·T × S·T mask.

Step 0 is causal inside its record. The query of step i at column t attends causally to step 0's keys
≤ t and, of each step 1 ≤ j ≤ i, to column t alone. So each step is one causal attention over step 0's
keys plus i single keys per column, merged by log-sum-exp. The backward pass gives the causal kernel the
*merged* output and log-sum-exp, which makes its gradients exact. Records are packed without padding; a
prompt's columns serve as keys and get no query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
QUERY_CHUNK = 256


class Segment(NamedTuple):
    """One record of a packed batch: its key columns, and its queries, which are the last of those columns."""

    key_start: int
    key_end: int
    query_start: int
    query_end: int


def unroll_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    diagonal: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segments: Sequence[Segment],
) -> torch.Tensor:
    """Attention of one unroll step: q [M, heads, d], step 0's k and v [N, kv_heads, d] → [M, heads, d].

    `diagonal` holds the (k, v), each [M, kv_heads, d], of steps 1..i; it is empty for step 0.
    """
    flat = [tensor for pair in diagonal for tensor in pair]
    result: torch.Tensor = _UnrollAttention.apply(q, k, v, tuple(segments), *flat)  # type: ignore[no-untyped-call]
    return result


class _UnrollAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, segments: Any, *diagonal: Any) -> Any:
        out, lse = _causal(q, k, v, segments)
        if diagonal:
            out, lse = _merge_diagonal(q, out, lse, diagonal)
        ctx.save_for_backward(q, k, v, out, lse, *diagonal)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *diagonal = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_q, grad_k, grad_v = _causal_backward(grad, q, k, v, out, lse, ctx.segments)
        if not diagonal:
            return grad_q, grad_k, grad_v, None
        wide = lse.dtype
        groups, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
        grouped_q = _grouped(q, groups).to(wide)  # [M, kv, g, d]
        grouped_grad = _grouped(grad, groups).to(wide)
        delta = (grouped_grad * _grouped(out, groups).to(wide)).sum(-1)  # [M, kv, g]
        grouped_lse = lse.view(delta.shape)
        extra_q = torch.zeros_like(grouped_q)
        grad_diagonal = []
        for key, value in zip(diagonal[::2], diagonal[1::2], strict=True):
            key_wide, value_wide = key.to(wide).unsqueeze(2), value.to(wide).unsqueeze(2)  # [M, kv, 1, d]
            share = ((grouped_q * key_wide).sum(-1) * scale - grouped_lse).exp_()  # [M, kv, g]
            grad_score = share * ((grouped_grad * value_wide).sum(-1) - delta) * scale
            extra_q.addcmul_(grad_score.unsqueeze(-1), key_wide)
            grad_diagonal.append((grad_score.unsqueeze(-1) * grouped_q).sum(2).to(key.dtype))
            grad_diagonal.append((share.unsqueeze(-1) * grouped_grad).sum(2).to(value.dtype))
        grad_q = (grad_q.to(wide) + extra_q.view(q.shape)).to(q.dtype)
        return grad_q, grad_k, grad_v, None, *grad_diagonal


def _merge_diagonal(q: Any, out: Any, lse: Any, diagonal: Sequence[Any]) -> Any:
    """Add the single keys of steps 1..i at each query's own column to a causal result."""
    wide, groups, scale = lse.dtype, q.shape[1] // diagonal[0].shape[1], q.shape[2] ** -0.5
    grouped_q = _grouped(q, groups).to(wide)
    shape = grouped_q.shape[:3]
    scores = [(grouped_q * key.to(wide).unsqueeze(2)).sum(-1) * scale for key in diagonal[::2]]  # each [M, kv, g]
    merged = torch.stack([lse.view(shape), *scores]).logsumexp(0)
    total = _grouped(out, groups).to(wide) * (lse.view(shape) - merged).exp().unsqueeze(-1)
    for score, value in zip(scores, diagonal[1::2], strict=True):
        total.addcmul_((score - merged).exp().unsqueeze(-1), value.to(wide).unsqueeze(2))
    return total.view(out.shape).to(out.dtype), merged.view(lse.shape)


def _causal(q: Any, k: Any, v: Any, segments: Sequence[Segment]) -> Any:
    """Causal attention per record: out [M, heads, d] and log-sum-exp [M, heads] (fp32, or fp64 for fp64)."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=_wide(q.dtype), device=q.device)
    for segment in segments:
        rows = slice(segment.query_start, segment.query_end)
        piece, piece_lse = None, None
        for query, key, value, is_causal in _blocks(q, k, v, segment):
            part, part_lse = _attend(query, key, value, is_causal)
            if piece is None:
                piece, piece_lse = part, part_lse
            else:
                piece, piece_lse = _merge(piece, piece_lse, part, part_lse)
        assert piece is not None
        assert piece_lse is not None
        out[rows] = piece.permute(2, 0, 1, 3).reshape(out[rows].shape)
        lse[rows] = piece_lse.permute(2, 0, 1).reshape(lse[rows].shape)
    return out, lse


def _causal_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segments: Sequence[Segment]) -> Any:
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = q.shape[1] // k.shape[1]
    for segment in segments:
        rows = slice(segment.query_start, segment.query_end)
        shape = (k.shape[1], groups, rows.stop - rows.start)
        piece_grad, piece_out = _split_heads(grad[rows], groups), _split_heads(out[rows], groups)
        piece_lse = lse[rows].view(shape[2], shape[0], shape[1]).permute(1, 2, 0).contiguous()
        total = None
        key_end = segment.key_end
        for query, key, value, is_causal in reversed(list(_blocks(q, k, v, segment))):
            part_q, part_k, part_v = _attend_backward(piece_grad, query, key, value, piece_out, piece_lse, is_causal)
            columns = slice(key_end - key.shape[2], key_end)
            key_end = columns.start
            grad_k[columns] = part_k.sum(1).transpose(0, 1)
            grad_v[columns] = part_v.sum(1).transpose(0, 1)
            total = part_q if total is None else total + part_q
        assert total is not None
        grad_q[rows] = total.permute(2, 0, 1, 3).reshape(grad_q[rows].shape)
    return grad_q, grad_k, grad_v


def _blocks(q: Any, k: Any, v: Any, segment: Segment) -> Any:
    """The full block over a record's prompt columns (if any), then the causal square over its query columns."""
    groups = q.shape[1] // k.shape[1]
    query = _split_heads(q[segment.query_start : segment.query_end], groups)
    prefix_end = segment.key_end - (segment.query_end - segment.query_start)
    for start, end, is_causal in ((segment.key_start, prefix_end, False), (prefix_end, segment.key_end, True)):
        if end > start:
            # stride 0 over the group: grouped-query attention without a copy of keys and values
            key = k[start:end].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
            value = v[start:end].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
            yield query, key, value, is_causal


def _attend(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
    """One block, [kv, g, m, d] by [kv, g, n, d]: torch's own flash kernel on a CPU, plain matrices elsewhere."""
    if _has_flash_kernel(query):
        return _flash(query, key, value, 0.0, is_causal)
    outs, lses = [], []
    for start in range(0, query.shape[2], QUERY_CHUNK):
        scores = _scores(query, key, start, is_causal)
        lses.append(scores.logsumexp(-1))
        outs.append(((scores - lses[-1].unsqueeze(-1)).exp() @ value.to(scores.dtype)).to(query.dtype))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attend_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, is_causal: bool) -> Any:
    if _has_flash_kernel(query):
        return _flash_backward(grad, query, key, value, out, lse, 0.0, is_causal)
    wide, scale = lse.dtype, query.shape[-1] ** -0.5
    grad_q = []
    grad_k, grad_v = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    for start in range(0, query.shape[2], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        share = (_scores(query, key, start, is_causal) - lse[:, :, rows].unsqueeze(-1)).exp()
        wide_grad = grad[:, :, rows].to(wide)
        delta = (wide_grad * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
        grad_scores = share * (wide_grad @ value.to(wide).transpose(-1, -2) - delta) * scale
        grad_q.append((grad_scores @ key.to(wide)).to(query.dtype))
        grad_k += grad_scores.transpose(-1, -2) @ query[:, :, rows].to(wide)
        grad_v += share.transpose(-1, -2) @ wide_grad
    return torch.cat(grad_q, 2), grad_k.to(key.dtype), grad_v.to(value.dtype)


def _scores(query: Any, key: Any, start: int, is_causal: bool) -> Any:
    chunk = query[:, :, start : start + QUERY_CHUNK].to(_wide(query.dtype))
    scores = chunk @ key.to(chunk.dtype).transpose(-1, -2) * query.shape[-1] ** -0.5
    if is_causal:
        row = torch.arange(start, start + chunk.shape[2], device=query.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(key.shape[2], device=query.device) > row, -torch.inf)
    return scores


def _merge(out: Any, lse: Any, other: Any, other_lse: Any) -> Any:
    merged = torch.logaddexp(lse, other_lse)
    total = out.to(lse.dtype) * (lse - merged).exp().unsqueeze(-1) + other.to(lse.dtype) * (other_lse - merged).exp().unsqueeze(-1)
    return total.to(out.dtype), merged


def _split_heads(x: Any, groups: int) -> Any:
    """[m, heads, d] → [kv, g, m, d], a view."""
    return _grouped(x, groups).permute(1, 2, 0, 3)


def _grouped(x: Any, groups: int) -> Any:
    """[m, heads, d] → [m, kv, g, d], a view: query head h reads key head h // g."""
    return x.view(x.shape[0], -1, groups, x.shape[2])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _has_flash_kernel(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
