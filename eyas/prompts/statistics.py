"""Figures of a dataset's prompts for its manifest and the report: token lengths, splits, samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

_NUM_SAMPLES = 3
_SAMPLE_CHARS = 400


class PromptStatistics:
    """Collects figures from prompt rows in the order of their ids; 4 bytes a prompt."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._lengths: list[int] = []
        self._splits: Counter[str] = Counter()
        self._num_open = 0
        self._samples: list[str] = []

    def add(self, row: dict[str, Any]) -> None:
        """Count one row of `prompts.parquet`."""
        self._lengths.append(len(row["input_ids"]))
        self._splits[row["split"]] += 1
        self._num_open += row["opens_think"]
        if len(self._samples) < _NUM_SAMPLES:
            self._samples.append(self._decode(row["input_ids"])[:_SAMPLE_CHARS])

    def figures(self) -> dict[str, Any]:
        """`tokens` (p50, p90, max, sum), `histogram` (bounds double from 16 on), `splits`, `opens_think`, `samples`."""
        lengths = np.asarray(self._lengths, dtype=np.int64)
        if not len(lengths):
            return {
                "tokens": {"p50": 0, "p90": 0, "max": 0, "sum": 0},
                "histogram": [],
                "splits": {},
                "opens_think": 0,
                "samples": [],
            }
        p50, p90 = (int(value) for value in np.percentile(lengths, [50, 90], method="lower"))
        return {
            "tokens": {"p50": p50, "p90": p90, "max": int(lengths.max()), "sum": int(lengths.sum())},
            "histogram": _histogram(lengths),
            "splits": {name: self._splits[name] for name in ("train", "heldout")},
            "opens_think": self._num_open,
            "samples": self._samples,
        }


def _histogram(lengths: Any) -> list[dict[str, int]]:
    """Prompts per range [from, to) of tokens."""
    bounds = [0, 16]
    while bounds[-1] <= int(lengths.max()):
        bounds.append(bounds[-1] * 2)
    counts, _ = np.histogram(lengths, bins=bounds)
    return [{"from": low, "to": high, "prompts": int(count)} for low, high, count in zip(bounds, bounds[1:], counts, strict=False)]
