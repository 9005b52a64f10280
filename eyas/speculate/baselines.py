"""What a draft must beat: a bigram table and prompt-lookup, with the same K, by exact simulation.

Both are walked over the very replies that the draft was served on (`accept.walk`), so the figures stand
side by side. Neither costs a forward pass, so a draft that does not beat them earns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from eyas.speculate.accept import AcceptCounts, walk

LOOKUP_NGRAM = 3
_BUFFERED_PAIRS = 1 << 22


class BigramTable:
    """The most frequent successor of each token among generated tokens (ties: the smaller id)."""

    def __init__(self, successor: Mapping[int, int]) -> None:
        self._successor = dict(successor)

    @classmethod
    def from_records(cls, records: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]]) -> BigramTable:
        """Count over (input_ids, loss_mask) of training records; a pair counts where its second token was generated.

        Memory is bounded by the number of distinct pairs, 16 bytes each, plus a buffer of 32 MB.
        """
        keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        pending: list[NDArray[np.int64]] = []
        for input_ids, loss_mask in records:
            pairs = (input_ids[:-1].astype(np.int64) << 32) | input_ids[1:].astype(np.int64)
            pending.append(pairs[loss_mask[1:] != 0])
            if sum(map(len, pending)) >= _BUFFERED_PAIRS:
                keys, counts = _merge(keys, counts, pending)
                pending = []
        keys, counts = _merge(keys, counts, pending)
        order = np.lexsort((keys & 0xFFFFFFFF, -counts, keys >> 32))
        previous, first = np.unique(keys[order] >> 32, return_index=True)
        return cls(dict(zip(previous.tolist(), (keys[order][first] & 0xFFFFFFFF).tolist(), strict=True)))

    def propose(self, last_token: int, num_draft_tokens: int) -> list[int]:
        """A chain of successors; it ends early at a token that never had one."""
        drafts: list[int] = []
        while len(drafts) < num_draft_tokens and (last_token := self._successor.get(last_token, -1)) >= 0:
            drafts.append(last_token)
        return drafts


def _merge(
    keys: NDArray[np.int64], counts: NDArray[np.int64], pending: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    fresh_keys, fresh_counts = np.unique(np.concatenate([*pending, np.empty(0, np.int64)]), return_counts=True)
    merged, place = np.unique(np.concatenate([keys, fresh_keys]), return_inverse=True)
    summed = np.zeros(len(merged), np.int64)
    np.add.at(summed, place, np.concatenate([counts, fresh_counts]))
    return merged, summed


def bigram_counts(table: BigramTable, reply: Sequence[int], num_draft_tokens: int) -> AcceptCounts:
    """Counts of the bigram table as a drafter of `num_draft_tokens` on one greedy reply."""
    return walk(reply, num_draft_tokens, lambda position: table.propose(reply[position - 1], num_draft_tokens))


def prompt_lookup_counts(prompt: Sequence[int], reply: Sequence[int], num_draft_tokens: int) -> AcceptCounts:
    """Counts of prompt-lookup on one greedy reply.

    The longest suffix of prompt and reply so far, of 3, 2 or 1 tokens, is looked up at its latest earlier
    place, and the tokens that followed there are the drafts.
    """
    context = [*prompt, *reply]
    # latest[n][ngram] = where its latest occurrence that has a successor in the known context ends
    latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(LOOKUP_NGRAM + 1)]
    known = 0  # n-grams that end before this place are in `latest`

    def propose(position: int) -> list[int]:
        nonlocal known
        length = len(prompt) + position
        while known < length - 1:
            known += 1
            for size in range(1, min(LOOKUP_NGRAM, known) + 1):
                latest[size][tuple(context[known - size : known])] = known
        for size in range(min(LOOKUP_NGRAM, length - 1), 0, -1):
            end = latest[size].get(tuple(context[length - size : length]))
            if end is not None:
                return context[end : min(end + num_draft_tokens, length)]
        return []

    return walk(reply, num_draft_tokens, propose)
