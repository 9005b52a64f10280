from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from eyas.speculate import baselines
from eyas.speculate.accept import AcceptCounts, walk
from eyas.speculate.baselines import BigramTable, bigram_counts, prompt_lookup_counts


def record(ids: list[int], mask: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.int32), np.array(mask, np.int8)


def test_bigrams_count_generated_tokens_only() -> None:
    table = BigramTable.from_records([record([1, 2, 1, 3], [0, 0, 1, 1]), record([1, 2, 1, 2], [0, 0, 0, 0])])
    assert table.propose(1, 1) == [3]  # 1 -> 2 stood in prompts alone
    assert table.propose(2, 3) == [1, 3]  # ends at 3, which never had a successor


def test_bigram_ties_go_to_the_smaller_id() -> None:
    assert BigramTable.from_records([record([5, 9], [0, 1]), record([5, 4], [0, 1])]).propose(5, 1) == [4]


def test_bigram_table_agrees_with_plain_counting_however_it_is_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(0)
    records = [([random_.randrange(6) for _ in range(50)], [random_.randrange(2) for _ in range(50)]) for _ in range(20)]
    counts = Counter(
        (previous, token) for ids, mask in records for previous, token, made in zip(ids, ids[1:], mask[1:], strict=False) if made
    )
    best = {last: min((-n, token) for (prev, token), n in counts.items() if prev == last)[1] for last in range(6)}
    monkeypatch.setattr(baselines, "_BUFFERED_PAIRS", 64)
    table = BigramTable.from_records([record(ids, mask) for ids, mask in records])
    assert {last: table.propose(last, 1)[0] for last in range(6)} == best


def test_bigram_chain_is_walked_from_the_last_token() -> None:
    table = BigramTable({1: 2, 2: 3, 3: 4})
    assert bigram_counts(table, [1, 2, 3, 4, 1, 2], 3) == AcceptCounts(verifications=2, accepted=4, histogram=(0, 1, 0, 1))


def test_prompt_lookup_copies_what_followed_the_longest_suffix() -> None:
    prompt = [1, 2, 3, 50, 9, 3, 60, 1, 2]
    # after the reply's 3 the suffix (1, 2, 3) wins over the later (3): drafts 50, 9, 3 instead of 60, 1, 2
    assert prompt_lookup_counts(prompt, [3, 50, 9, 61], 3) == AcceptCounts(verifications=1, accepted=2, histogram=(0, 0, 1))


def slow_lookup(prompt: list[int], reply: list[int], k: int) -> AcceptCounts:
    def propose(position: int) -> list[int]:
        known = prompt + reply[:position]
        for size in (3, 2, 1):
            if size >= len(known):
                continue
            for end in range(len(known) - 1, size - 1, -1):
                if known[end - size : end] == known[len(known) - size :]:
                    return known[end : end + k]
        return []

    return walk(reply, k, propose)


@pytest.mark.parametrize("seed", range(10))
def test_prompt_lookup_agrees_with_plain_search(seed: int) -> None:
    random_ = random.Random(seed)
    prompt = [random_.randrange(4) for _ in range(random_.randint(1, 30))]
    reply = [random_.randrange(4) for _ in range(80)]
    assert prompt_lookup_counts(prompt, reply, 3) == slow_lookup(prompt, reply, 3)
