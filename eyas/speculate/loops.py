"""Where a reply begins to repeat itself: the written rule for loops.

A small greedy model loops, and a loop flatters every draft, so accept lengths are given on the part of
a reply before it. The rule, on ids alone: *a reply loops from the first token that begins a run of 24
tokens which stood in the same reply before, word for word* (the two may overlap). The first round of a
loop thus counts and its repetitions do not; whatever follows a loop is left out too.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_TOKENS = 24


def loop_free_tokens(output_ids: Sequence[int], run_tokens: int = LOOP_TOKENS) -> int:
    """Number of tokens of a reply before its first repetition of `run_tokens` tokens; all of them without a loop."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(output_ids) - run_tokens + 1):
        run = tuple(output_ids[start : start + run_tokens])
        if run in seen:
            return start
        seen.add(run)
    return len(output_ids)
