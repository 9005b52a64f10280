"""Figures of a dataset's prompts for its manifest and the report: token lengths, splits, samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from eyas.prompts.store import read_prompt_batches

_NUM_SAMPLES = 3
_SAMPLE_CHARS = 400
_SAMPLE_TOKENS = 400


def prompt_figures(folder: Path, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """`tokens` (p50, p90, max, sum), `histogram` (bounds double from 16 on), `splits`, `opens_think`, `samples` (the first three).

    A sample is the decoded beginning of a prompt, 400 characters at most. Takes 4 bytes a prompt.
    """
    parts: list[npt.NDArray[np.int32]] = []
    splits: Counter[str] = Counter()
    num_open = 0
    samples: list[str] = []
    for batch in read_prompt_batches(folder, ["split", "input_ids", "opens_think"]):
        parts.append(pc.list_value_length(batch.column("input_ids")).to_numpy())
        splits.update(batch.column("split").to_pylist())
        num_open += batch.column("opens_think").true_count
        for ids in batch.column("input_ids").slice(0, _NUM_SAMPLES - len(samples)).to_pylist():
            samples.append(decode(ids[:_SAMPLE_TOKENS])[:_SAMPLE_CHARS])
    lengths = np.concatenate([np.empty(0, dtype=np.int32), *parts]).astype(np.int64)
    if not len(lengths):
        return {"tokens": {"p50": 0, "p90": 0, "max": 0, "sum": 0}, "histogram": [], "splits": {}, "opens_think": 0, "samples": []}
    p50, p90 = (int(value) for value in np.percentile(lengths, [50, 90], method="lower"))
    return {
        "tokens": {"p50": p50, "p90": p90, "max": int(lengths.max()), "sum": int(lengths.sum())},
        "histogram": _histogram(lengths),
        "splits": {name: splits[name] for name in ("train", "heldout")},
        "opens_think": num_open,
        "samples": samples,
    }


def _histogram(lengths: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Prompts per range [from, to) of tokens."""
    bounds = [0, 16]
    while bounds[-1] <= int(lengths.max()):
        bounds.append(bounds[-1] * 2)
    counts, _ = np.histogram(lengths, bins=bounds)
    return [{"from": low, "to": high, "prompts": int(count)} for low, high, count in zip(bounds, bounds[1:], counts, strict=False)]
