"""The proof that a source gives what the draft will be trained on, before it runs for hours.

On a few replies: as many rows as ids, all finite; aux states equal to a plain forward's at the right blocks;
lm_head of the final state gives the target's own greedy token. The message of a failure says which of layer,
norm, precision or template is wrong, by trying each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.errors import GateError
from eyas.hidden.sources.protocol import Source, States, TokenIds
from eyas.hidden.store.reader import LAYERS, not_finite
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetHead

TIE_SHARE = 2.0**-6
"""A logit gap of this share of the top logit is a tie: four steps of bf16, what two kernels or shapes may differ by."""
MAX_STATE_ERROR = 0.05
"""Relative error allowed between two computations of a block's output; another block's output is off by 0.3 and more."""
MAX_SERVER_STATE_ERROR = 0.15
"""The same between a server's own kernels and number formats and a plain forward here."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProbeReply:
    """A reply of the target: its ids, of which those from `prompt_tokens` on were generated."""

    id: str
    tokens: TokenIds  # [T]
    prompt_tokens: int


def probe_states(source: Source, replies: Sequence[ProbeReply], hidden_size: int) -> list[States]:
    """States of `replies`, in order; raises `GateError` where rows, widths or values are wrong."""
    states = dict(source.extract([reply.tokens for reply in replies]))
    for index, reply in enumerate(replies):
        if index not in states:
            raise GateError(f"probe: the source gave no states for record {reply.id}")
        fault = states_fault(states[index], len(reply.tokens), hidden_size)
        if fault is not None:
            raise GateError(f"probe: record {reply.id}: {fault}")
    return [states[index] for index in range(len(replies))]


def states_fault(states: States, num_tokens: int, hidden_size: int) -> str | None:
    """What is wrong with the states of `num_tokens` ids, or None: rows, widths, finite values."""
    for name, tensor, width in (("aux", states.aux, 3 * hidden_size), ("final", states.final, hidden_size)):
        if tuple(tensor.shape) != (num_tokens, width):
            return (
                f"{name} states are {list(tensor.shape)}, wanted {[num_tokens, width]}: rows must equal ids (is a prefix cache on, "
                "or a chunk lost?)"
            )
    return not_finite(states.aux, states.final)


def check_blocks(
    states: States, plain: Sequence[torch.Tensor], spec: TargetSpec, largest_error: float = MAX_STATE_ERROR
) -> dict[str, float]:
    """Compare states with a plain forward's `hidden_states`: n + 1 tensors [T, H], entry k + 1 = output of block k, the last
    after the final norm.

    Returns the relative error per layer; raises `GateError` naming the block that fits where ours does not.
    """
    final_error = _relative_error(states.final.float(), plain[-1].float())
    if final_error > largest_error:
        raise GateError(
            f"probe: the final state is not the input of lm_head (error {final_error:.3f}, at most {largest_error}): it must "
            "be taken after the final norm"
        )
    errors = {"final": final_error}
    for name, block, ours in zip(LAYERS, spec.aux_blocks, states.aux.float().chunk(3, dim=-1), strict=True):
        per_block = [_relative_error(ours, other.float()) for other in plain[1:-1]]  # the last entry is after the final norm
        errors[name] = per_block[block]
        if per_block[block] > largest_error:
            best = int(np.argmin(per_block))
            verdict = (
                f"it fits the output of block {best} (error {per_block[best]:.3f}): the layer ids are off by {best - block}"
                if per_block[best] <= largest_error
                else "it fits no block: precision, weights or template differ"
            )
            raise GateError(f"probe: the {name} state is not the output of block {block} (error {per_block[block]:.3f}); {verdict}")
    return errors


def check_greedy(
    states: Sequence[States], replies: Sequence[ProbeReply], head: TargetHead, spec: TargetSpec, wanted: float
) -> dict[str, float]:
    """lm_head of the final states must give the generated token where the target decoded greedily, ties aside.

    Returns the share that agrees and the share of ties; raises `GateError` below `wanted`, saying what would agree.
    """
    agreed = ties = total = 0
    for state, reply in zip(states, replies, strict=True):
        hits, near = _agreement(state.final, reply, head.lm_head)
        agreed, ties, total = agreed + hits, ties + near, total + len(reply.tokens) - reply.prompt_tokens
    share = (agreed + ties) / max(1, total)
    if share < wanted:
        diagnosis = _diagnosis(states, replies, head, spec, share)
        raise GateError(
            f"probe: lm_head of the final state gives the target's token at {agreed / total:.1%} of {total} generated positions "
            f"({ties / total:.1%} ties), wanted {wanted:.1%} (hidden.min_greedy_agreement); {diagnosis}"
        )
    return {"greedy_agreement": agreed / max(1, total), "greedy_ties": ties / max(1, total), "greedy_positions": float(total)}


def _agreement(final: torch.Tensor, reply: ProbeReply, lm_head: torch.Tensor, shift: int = 0) -> tuple[int, int]:
    """(positions whose argmax is the generated token, further ones where it is a tie); `shift` misaligns on purpose."""
    first = reply.prompt_tokens
    rows = torch.arange(first - 1, len(reply.tokens) - 1) + shift
    keep = (rows >= 0) & (rows < len(final))
    wanted = torch.from_numpy(reply.tokens[first:].astype(np.int64))[keep]
    hits = near = 0
    for part, tokens in zip(torch.split(rows[keep], 256), torch.split(wanted, 256), strict=True):
        is_hit, is_tie = compare_greedy(final[part], tokens, lm_head)
        hits, near = hits + int(is_hit.sum()), near + int(is_tie.sum())
    return hits, near


def compare_greedy(final: torch.Tensor, tokens: torch.Tensor, lm_head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether lm_head [V, H] of final states [N, H] gives the tokens [N], whether another one by no more than a tie), [N] bool."""
    logits = (final.to(lm_head.dtype) @ lm_head.T).float()  # [N, V]
    top, best = logits.max(dim=-1)
    gap = top - logits.gather(1, tokens[:, None])[:, 0]
    is_hit = best == tokens
    return is_hit, ~is_hit & (gap <= TIE_SHARE * top.abs())


def _diagnosis(states: Sequence[States], replies: Sequence[ProbeReply], head: TargetHead, spec: TargetSpec, share: float) -> str:
    total = sum(len(reply.tokens) - reply.prompt_tokens for reply in replies)

    def rate(shift: int, normed: bool) -> float:
        pairs = zip(states, replies, strict=True)
        found = [_agreement(_norm(s.final, head, spec) if normed else s.final, r, head.lm_head, shift) for s, r in pairs]
        return sum(hits + near for hits, near in found) / total

    if (other := rate(0, True)) > share + 0.2:
        return f"with the final norm applied it would be {other:.1%}: the source gives the state before the norm"
    for shift in (-1, 1):
        if (other := rate(shift, False)) > share + 0.2:
            return f"shifted by {shift} row it would be {other:.1%}: ids and states are misaligned (template or BOS)"
    if share > 0.8:
        return "nearly right: precision or weights differ from those that generated (quantisation, revision, dtype)"
    return "neither norm nor shift explains it: other weights, another template, or replies that were not greedy"


def _norm(final: torch.Tensor, head: TargetHead, spec: TargetSpec) -> torch.Tensor:
    wide = final.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps) * head.norm.float()


def _relative_error(ours: torch.Tensor, other: torch.Tensor) -> float:
    return float((ours - other).norm() / other.norm().clamp(min=1e-12))
