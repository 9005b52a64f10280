"""Contamination: prompts that share an n-gram of words with a benchmark that the draft is measured on.

A benchmark prompt shorter than n words counts whole, down to five words. A row is looked at closely
only where n words in a row all occur in some benchmark, which in other text is rare.
"""

from __future__ import annotations

from collections.abc import Iterable

from eyas.errors import ConfigError
from eyas.prompts.benchsets import load_benchmark_prompts
from eyas.prompts.conversation import texts_of
from eyas.prompts.words import words_of

_MIN_WORDS = 5


class Contamination:
    """Index of benchmark n-grams; about 60 bytes an n-gram."""

    def __init__(self, benchmarks: Iterable[tuple[str, list[str]]], num_words: int) -> None:
        """`benchmarks` holds (label of the prompt, its words)."""
        self._grams: dict[int, dict[str, str]] = {}
        self._firsts: dict[int, set[str]] = {}
        self._vocabulary: set[str] = set()
        for label, words in benchmarks:
            length = min(num_words, len(words))
            if length < _MIN_WORDS:
                continue
            self._vocabulary.update(words)
            grams = self._grams.setdefault(length, {})
            self._firsts.setdefault(length, set()).update(words[: len(words) - length + 1])
            for start in range(len(words) - length + 1):
                grams.setdefault(" ".join(words[start : start + length]), label)

    def find(self, words: list[str]) -> str:
        """What the words share with a benchmark, as "label: n-gram", or ""."""
        known = bytes(map(self._vocabulary.__contains__, words))  # 1 where a benchmark has the word
        for length, grams in self._grams.items():
            run = b"\x01" * length
            firsts = self._firsts[length]
            start = known.find(run)
            while start >= 0:
                if words[start] in firsts:
                    gram = " ".join(words[start : start + length])
                    if gram in grams:
                        return f"{grams[gram]}: {gram}"
                start = known.find(run, start + 1)
        return ""


def load_contamination(names: list[str], num_words: int) -> Contamination:
    """The index of the named benchmark sets; raises `ConfigError` where one cannot be read."""
    benchmarks = []
    for name in names:
        for number, conversation in enumerate(load_benchmark_prompts(name), start=1):
            words = words_of(texts_of(conversation.messages))
            if not words:
                raise ConfigError(f"benchmark set {name}: prompt {number} holds no word; correct prompts.decontaminate_against")
            benchmarks.append((f"{name} #{number}", words))
    return Contamination(benchmarks, num_words)
