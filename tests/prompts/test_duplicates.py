from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.prompts.contamination import Contamination
from eyas.prompts.duplicates import NUM_PERMUTATIONS, band_rows, find_near_duplicates, signature
from eyas.prompts.words import words_of


def _triples(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(words, words[1:], words[2:], strict=False))


def _jaccard(first: list[str], second: list[str]) -> float:
    a, b = _triples(first), _triples(second)
    return len(a & b) / len(a | b)


def _texts(seed: int, num_texts: int) -> list[list[str]]:
    """Random texts and mutations of them, from lightly to heavily changed."""
    rng = random.Random(seed)
    texts: list[list[str]] = []
    while len(texts) < num_texts:
        if texts and rng.random() < 0.6:
            text = list(rng.choice(texts))
            for _ in range(rng.choice([0, 1, 2, 5, 10, 30])):
                text[rng.randrange(len(text))] = f"w{rng.randrange(5000)}"
        else:
            text = [f"w{rng.randrange(5000)}" for _ in range(rng.randrange(60, 160))]
        texts.append(text)
    return texts


def _signatures(texts: list[list[str]]) -> np.ndarray:
    return np.frombuffer(b"".join(signature(text) for text in texts), dtype="<u2").reshape(-1, NUM_PERMUTATIONS)


def test_signatures_estimate_jaccard() -> None:
    texts = _texts(0, 60)
    signatures = _signatures(texts)
    errors = [
        (signatures[i] == signatures[j]).mean() - _jaccard(texts[i], texts[j])
        for i in range(60)
        for j in range(i)
        if _jaccard(texts[i], texts[j]) > 0
    ]
    assert len(errors) > 50
    assert abs(np.mean(errors)) < 0.03
    assert np.abs(errors).max() < 0.16


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.95])
def test_what_is_dropped_equals_the_slow_way(threshold: float) -> None:
    """Slow way: every pair compared in order, by whole signatures."""
    texts = _texts(1, 400)
    signatures = _signatures(texts)
    kept: list[int] = []
    wanted = []
    for row in range(len(texts)):
        if any((signatures[row] == signatures[other]).mean() >= threshold for other in kept):
            wanted.append(row)
        else:
            kept.append(row)
    found = find_near_duplicates(signatures, [bytes([index % 256, index // 256]) for index in range(400)], threshold)
    assert len(wanted) > 20
    missed = set(wanted) ^ {duplicate.row for duplicate in found}
    assert len(missed) <= 0.02 * len(wanted) + 1
    assert all(duplicate.of < duplicate.row and duplicate.similarity >= threshold for duplicate in found)


def test_rows_of_one_conversation_are_never_duplicates_of_each_other() -> None:
    text = _texts(2, 1)[0]
    signatures = _signatures([text] * 5)
    groups = [b"a", b"a", b"b", b"a", b"b"]
    assert [(found.row, found.of) for found in find_near_duplicates(signatures, groups, 0.8)] == [(2, 0), (4, 0)]


def test_a_dropped_row_drops_no_other() -> None:
    """b is like a and c is like b, but c is not like a: c stays, since b is gone."""
    base = [f"w{index}" for index in range(100)]
    middle = [f"x{index}" if index < 8 else word for index, word in enumerate(base)]
    far = [f"y{index}" if index >= 92 else word for index, word in enumerate(middle)]
    signatures = _signatures([base, middle, far])
    threshold = 0.8
    assert _jaccard(base, middle) > threshold
    assert _jaccard(middle, far) > threshold
    assert _jaccard(base, far) < 0.75
    assert [found.row for found in find_near_duplicates(signatures, [b"a", b"b", b"c"], threshold)] == [1]


@pytest.mark.parametrize("texts", [[[], []], [["a"], ["a"]], [["a", "b"], ["a", "b"]]])
def test_short_and_empty_texts_have_a_signature(texts: list[list[str]]) -> None:
    assert [found.row for found in find_near_duplicates(_signatures(texts), [b"a", b"b"], 0.8)] == [1]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9, 1.0])
def test_bands_find_a_pair_at_the_threshold(threshold: float) -> None:
    rows = band_rows(threshold)
    assert 1 - (1 - threshold**rows) ** (NUM_PERMUTATIONS // rows) >= 0.995


def test_words_ignore_case_and_punctuation_and_split_cjk() -> None:
    assert words_of(["Hello, World!", "写论文 now_1"]) == ["hello", "world", "写", "论", "文", "now_1"]


@given(text=st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_words_equal_those_of_any_text(text: str) -> None:
    assert words_of([text, "“naïve”"]) == [*words_of([text]), "naïve"]
    assert words_of([f"“{text}” – it’s"]) == [*words_of([text]), "it", "s"]


def test_contamination_equals_the_slow_way() -> None:
    rng = random.Random(3)
    vocabulary = [f"w{index}" for index in range(30)]
    benchmarks = [("b", [rng.choice(vocabulary) for _ in range(rng.choice([3, 6, 9, 40]))]) for _ in range(40)]
    grams: set[tuple[str, ...]] = set()
    for _, words in benchmarks:
        length = min(8, len(words))
        if length >= 5:
            grams |= {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
    index = Contamination(benchmarks, 8)
    num_found = 0
    for _ in range(400):
        text = [rng.choice([*vocabulary, "other", "more"]) for _ in range(30)]
        if rng.random() < 0.4:
            words = rng.choice(benchmarks)[1]
            text[5 : 5 + len(words)] = words
        wanted = any(tuple(text[start : start + length]) in grams for length in range(5, 9) for start in range(len(text)))
        assert bool(index.find(text)) is wanted
        num_found += wanted
    assert 50 < num_found < 350


def test_no_benchmark_contaminates_nothing() -> None:
    assert Contamination([], 13).find(["a"] * 100) == ""
