"""Which layers does a served draft read? Its counts, held against what a chain on each choice of layers can have.

A draft's own choice between two near-equal tokens may fall either way in low precision, as a target's may, and one such
flip moves the counts of a reply. So a decision whose gap is at most ε counts for both, ε being the largest |Δlogit| of the
draft at that place when the target's states come from one forward and from forwards of K + 1 tokens (the measure of
ties in `eyas.speculate.lossless`). A reply then has a set of possible counts, and a server is only off by its distance
from that set. Measured on SmolLM2-135M in bf16 with 8 replies of 10 to 160 tokens: off by 0 on the right layers, by 19 and
30 on shifted ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from eyas.speculate.accept import AcceptCounts
from eyas.speculate.deploy import Check

Counts = tuple[int, int]
"""(verifications, accepted) of one reply."""


def possible_counts(hits: torch.Tensor, is_tie: torch.Tensor, supervised: torch.Tensor) -> frozenset[Counts]:
    """Counts that the chain over one reply can have if each tied decision falls either way; all three [K, M] bool.

    `hits` and `supervised` as in `eyas.draft.replay.walk`, whose counts are among them.
    """
    num_steps, num_columns = hits.shape
    is_column = supervised[0].tolist()
    can_hit = ((hits | is_tie) & supervised).T.tolist()  # [M, K]
    can_miss = ((~hits | is_tie) | ~supervised).T.tolist()
    after: list[set[Counts]] = [{(0, 0)} for _ in range(num_columns + num_steps + 1)]
    for column in range(num_columns - 1, -1, -1):
        if not is_column[column]:
            after[column] = after[column + 1]
            continue
        after[column] = set()
        for run in range(num_steps + 1):
            if run == num_steps or can_miss[column][run]:
                after[column] |= {(1 + done, run + kept) for done, kept in after[column + 1 + run]}
            if run < num_steps and not can_hit[column][run]:
                break
    return frozenset(after[0])


def layer_check(served: Sequence[AcceptCounts], possible: Mapping[int, Sequence[Collection[Counts]]]) -> Check:
    """Whether the served counts fit the right layers best; `possible` is keyed by how far every layer is shifted."""
    distances = {
        shift: sum(
            min(abs(seen.verifications - verifications) + abs(seen.accepted - accepted) for verifications, accepted in counts)
            for seen, counts in zip(served, replies, strict=True)
        )
        for shift, replies in possible.items()
    }
    nearest = min(distances, key=lambda shift: (distances[shift], abs(shift)))
    seen = ", ".join(f"{shift:+d}: {distance}" for shift, distance in sorted(distances.items()))
    return Check(
        name="layers",
        holds=bool(served) and nearest == 0,
        seen=f"counts of {len(served)} replies off by {seen} with layers shifted so, ties granted",
        wanted="identical replies whose counts are nearest to the replay at +0",
    )
