"""Speculative decoding with a chain of K drafts: how they are drafted, verified and accepted.

Alignment (EAGLE-3). Let x[0..m-1] be known and the target's states g known for columns 0..m-2. Column t of the draft takes
token x[t+1] and g[t]; its output at column m-2 proposes x[m]. Chain step j = 1..K-1 runs at column m-2+j with the last
proposed token and the previous output (before `norm`) as state, so a chain step sees the true columns before it and its
own chain only. The target then verifies x[m-1] and the K proposals in one pass of K + 1 rows at positions m-1..m-1+K.

Acceptance. Greedy: proposals are kept while they equal the target's argmax, then the target's own token follows; the
reply is the target's. Above temperature 0 the proposal is a point mass, so keeping it with the target's probability p(d)
and otherwise drawing from p without d (renormalised) leaves p exactly (Leviathan et al. 2023, with q a point mass).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def draft_chain(
    states: Tensor,
    *,
    num_drafts: int,
    propose: Callable[[Tensor], Tensor],
    advance: Callable[[int, Tensor, Tensor], Tensor],
) -> Tensor:
    """The K proposals [B, K] of B requests, from `states` [B, H], the draft's outputs at column m-2 before `norm`.

    `propose(states)` gives target token ids [B]; `advance(j, tokens, states)` runs chain step j = 1..K-1 → states [B, H].
    """
    tokens = propose(states)
    chain = [tokens]
    for step in range(1, num_drafts):
        states = advance(step, tokens, states)
        tokens = propose(states)
        chain.append(tokens)
    return torch.stack(chain, dim=1)


def accept_greedy(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """New tokens, 1 to K + 1 of them: `targets` (K + 1 argmaxes) up to and with the first that its draft missed."""
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == targets[num_accepted]:
        num_accepted += 1
    return list(targets[: num_accepted + 1])


def accept_sampled(
    drafts: Sequence[int],
    probs: Tensor,
    uniforms: Sequence[tuple[float, float]],
    draw: Callable[[Tensor, list[float]], Tensor],
) -> list[int]:
    """New tokens, 1 to K + 1 of them, distributed as if each were drawn from its row of `probs` [K + 1, V].

    `uniforms` holds two independent numbers in [0, 1) per row: for keeping the draft and for drawing;
    `draw(weights [1, V], [u])` draws by inverse CDF from weights of any positive scale.
    """
    tokens: list[int] = []
    for row, draft in enumerate(drafts):
        keep, choose = uniforms[row]
        if keep < float(probs[row, draft]):
            tokens.append(draft)
            continue
        rest = probs[row].clone()
        rest[draft] = 0
        tokens.append(int(draw(rest[None], [choose])))
        return tokens
    tokens.append(int(draw(probs[len(drafts)][None], [uniforms[len(drafts)][1]])))
    return tokens
