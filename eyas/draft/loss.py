"""Soft cross-entropy of all unroll steps against the target, head included, forward and gradient in one pass.

Label row r (the target's distribution at t + 1 + i) serves every step at once: steps are shifted so that
they stand at their label row, and chunks of rows go through the target's D head rows once and through the
draft's head for all steps together. Only a chunk of [rows, D] floats ever exists. The gradients of states
and head are made in the forward pass, since nothing upstream changes the loss but a factor.

A row whose full-vocabulary argmax lies outside the draft vocabulary is dropped from the loss; it stays a
miss in every acceptance figure. Each step is divided by its *global* count of kept rows, never by B·T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812

from eyas.hidden.store.top import top_argmax, top_logits

CHUNK_ROWS = 1024
"""Rows (of all steps together) of one chunk of logits: 1,024 · D = 8,192 are 16 MB in bf16."""
BLOCK_ROWS = 64
"""Rows of one pass of softmax and gradient: 64 · 8,192 are 2 MB in fp32."""
ARGMAX_ROWS = 256
EXACT_IDS = 8192
Objective = Literal["soft_ce", "overlap"]


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """What the loss needs of the target: its D head rows and the vocabulary map."""

    head: torch.Tensor  # [D, H]: rows of lm_head for the draft vocabulary
    ids: torch.Tensor  # [D] int64: target ids, ascending
    to_draft: torch.Tensor  # [V] int64: draft id of a target id, −1 outside the draft vocabulary
    has_states: bool = True
    """Labels are final states [M, H]; otherwise top-k probabilities [M, 1 + 2k], as their store keeps them."""

    @classmethod
    def of(cls, lm_head: torch.Tensor, d2t: torch.Tensor, *, has_states: bool = True) -> TargetRows:
        """From the target's lm_head [V, H] and the offsets d2t [D]."""
        index = torch.arange(len(d2t), device=lm_head.device)
        ids = index + d2t.to(lm_head.device)
        to_draft = torch.full((len(lm_head),), -1, dtype=torch.int64, device=lm_head.device)
        to_draft[ids] = index
        return cls(head=lm_head[ids], ids=ids, to_draft=to_draft, has_states=has_states)

    def logits(self, labels: torch.Tensor) -> torch.Tensor:
        """The target's logits [M, D] over the draft vocabulary."""
        return F.linear(labels.to(self.head.dtype), self.head) if self.has_states else top_logits(labels, len(self.head))

    def argmax(self, labels: torch.Tensor, lm_head: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
        """The target's full-vocabulary argmax [M] int64 (`target_argmax`, or what the store keeps of it)."""
        return target_argmax(labels, lm_head, is_exact=is_exact) if self.has_states else top_argmax(labels)


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """`loss` is differentiable and already divided by the global counts; the rest are plain sums of this batch."""

    loss: torch.Tensor  # scalar
    step_loss: torch.Tensor  # [S]: sum of the cross-entropy over kept rows
    kept: torch.Tensor  # [S]: rows in the loss
    supervised: torch.Tensor  # [S]: rows in the acceptance figures
    hits: torch.Tensor  # [S]: rows where the draft's argmax is the target's; −1 where not asked for
    columns: torch.Tensor  # [4, S, M]: cross-entropy of kept rows, whether kept, hit, and counted for hits, by column


def target_argmax(final: torch.Tensor, lm_head: torch.Tensor, *, is_exact: bool = False) -> torch.Tensor:
    """Full-vocabulary argmax of each final state [M, H] → [M] int64, in `lm_head`'s precision, by chunks.

    bf16 logits tie among near equals; `is_exact` multiplies in fp32 at a quarter of the speed.
    """
    if lm_head.dtype == torch.float64 or not is_exact:
        pieces = [F.linear(rows.to(lm_head.dtype), lm_head).argmax(-1) for rows in torch.split(final, ARGMAX_ROWS)]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=final.device)
    best = torch.full((len(final),), -torch.inf, device=final.device)
    ids = torch.zeros(len(final), dtype=torch.int64, device=final.device)
    for start in range(0, len(lm_head), EXACT_IDS):
        values, found = F.linear(final.float(), lm_head[start : start + EXACT_IDS].float()).max(-1)
        is_better = values > best
        best, ids = torch.where(is_better, values, best), torch.where(is_better, found + start, ids)
    return ids


def kept_rows(supervised: torch.Tensor, argmax: torch.Tensor, rows: TargetRows) -> torch.Tensor:
    """[S, M] bool: supervised (step, column) whose label row's argmax [M] lies in the draft vocabulary."""
    in_vocabulary = rows.to_draft[argmax] >= 0  # [M], at label rows
    kept = supervised.clone()
    for step in range(len(kept)):
        kept[step, : kept.shape[1] - step] &= in_vocabulary[step:]
    return kept


def unrolled_loss(
    normed: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    argmax: torch.Tensor,
    supervised: torch.Tensor,
    rows: TargetRows,
    *,
    step_weights: torch.Tensor,
    wants_hits: bool,
    objective: Objective = "soft_ce",
) -> LossResult:
    """Loss of states after `norm` [S, M, H] through the draft's head [D, H].

    `labels` [M, H] are the target's final states at the label rows (or top-k probabilities, as `rows` says), `argmax` [M]
    their full-vocabulary argmax, `step_weights` [S] the weight of a row of each step, global normalisation included.
    """
    kept = kept_rows(supervised, argmax, rows)
    loss, row_loss, row_hits = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        _shift(normed),
        head,
        labels,
        _shift(kept),
        _shift(supervised),
        rows.to_draft[argmax],
        rows,
        step_weights,
        wants_hits,
        objective,
    )
    counted = supervised if wants_hits else torch.zeros_like(supervised)
    return LossResult(
        loss=loss,
        step_loss=row_loss.sum(1),
        kept=kept.sum(1),
        supervised=supervised.sum(1),
        hits=row_hits.sum(1) if wants_hits else torch.full((len(kept),), -1, device=kept.device),
        columns=torch.stack([_unshift(row_loss), *(mask.to(row_loss.dtype) for mask in (kept, _unshift(row_hits), counted))]),
    )


def _shift(x: torch.Tensor) -> torch.Tensor:
    """Move step i of [S, M, …] down by i rows, so that it stands at its label row; what falls off is never supervised."""
    num_rows = x.shape[1]
    return torch.stack([torch.cat([torch.zeros_like(x[i, :i]), x[i, : max(num_rows - i, 0)]]) for i in range(len(x))])


def _unshift(x: torch.Tensor) -> torch.Tensor:
    """Move step i of [S, M] back up by i rows, from its label row to its column."""
    return torch.stack([torch.cat([x[i, i:], torch.zeros_like(x[i, : min(i, x.shape[1])])]) for i in range(len(x))])


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Any,
        head: Any,
        labels: Any,
        kept: Any,
        supervised: Any,
        label_ids: Any,
        target_rows: Any,
        step_weights: Any,
        wants_hits: Any,
        objective: Any,
    ) -> Any:
        num_steps, num_rows, hidden_size = z.shape
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        needs_grad = any(ctx.needs_input_grad)
        row_weights = kept.to(wide) * step_weights.to(wide).unsqueeze(1)  # [S, M]
        losses = torch.zeros(num_steps, num_rows, dtype=wide, device=z.device)
        hits = torch.zeros(num_steps, num_rows, dtype=torch.bool, device=z.device)
        grad_z = torch.empty_like(z if needs_grad else z[:0])
        grad_head = torch.zeros_like(head if needs_grad else head[:0], dtype=wide)
        chunk, block = max(1, CHUNK_ROWS // num_steps), max(1, BLOCK_ROWS // num_steps)
        for start in range(0, num_rows, chunk):
            part = slice(start, min(start + chunk, num_rows))
            target_logits = target_rows.logits(labels[part])  # [C, D]
            flat = z[:, part].reshape(-1, hidden_size)  # [S · C, H]
            logits = F.linear(flat, head).view(num_steps, -1, len(head))  # [S, C, D]
            if wants_hits:
                hits[:, part] = (logits.argmax(-1) == label_ids[part]) & supervised[:, part]
            for first in range(0, logits.shape[1], block):  # elementwise work in pieces that stay in the cache
                rows = slice(first, first + block)
                p = target_logits[rows].softmax(-1, dtype=wide)
                losses[:, part][:, rows], grad = _OBJECTIVES[objective](logits[:, rows], p)
                if needs_grad:
                    logits[:, rows] = grad.mul_(row_weights[:, part][:, rows].unsqueeze(-1))  # logits give way to their gradient
            if needs_grad:
                flat_grad = logits.view(len(flat), -1)  # [S · C, D]
                grad_z[:, part] = (flat_grad @ head).view(num_steps, -1, hidden_size)
                grad_head += flat_grad.T @ flat
        if needs_grad:
            ctx.save_for_backward(grad_z, grad_head.to(head.dtype))
        row_loss = losses * kept
        ctx.mark_non_differentiable(row_loss, hits)
        return (losses * row_weights).sum(), row_loss, hits

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_z, grad_head = ctx.saved_tensors
        factor = grads[0]
        return (grad_z * factor.to(grad_z.dtype), grad_head * factor.to(grad_head.dtype), *[None] * 8)


def _soft_cross_entropy(logits: Any, p: Any) -> Any:
    """Losses −Σ p log q [S, C] of logits [S, C, D] against p [C, D], and their gradient q − p by the logits."""
    losses, q = _cross_entropy(logits, p)
    return losses, q.sub_(p)


def _overlap(logits: Any, p: Any) -> Any:
    """Soft cross-entropy plus 1 − Σ min(p, q), the probability that a sampled draft is refused."""
    losses, q = _cross_entropy(logits, p)
    losses += 1 - torch.minimum(p, q).sum(-1)
    below = q * (q < p)  # Σ min(p, q) grows with q there
    return losses, q.mul_(1 + below.sum(-1, keepdim=True)).sub_(p).sub_(below)


def _cross_entropy(logits: Any, p: Any) -> Any:
    x = logits.to(p.dtype)
    x = x - x.amax(-1, keepdim=True)
    dot = torch.matmul(x.transpose(0, 1), p.unsqueeze(-1)).squeeze(-1).T  # [S, C]: Σ p x without a temporary
    total = x.exp_().sum(-1, keepdim=True)
    return total.squeeze(-1).log() - dot, x.div_(total)


_OBJECTIVES = {"soft_ce": _soft_cross_entropy, "overlap": _overlap}
