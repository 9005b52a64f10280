"""What is known of a dataset's replies: lengths, how they end, reasoning, cache reuse. Constant memory.

Lengths go into a histogram with 2 % wide bins, exact below 64 tokens, so that median, p90 and p99 of ten
million replies cost 6 kB and are right to 1 %.
"""

from __future__ import annotations

import math
from typing import Any

_EXACT = 64
_RATIO = math.log(1.02)
_NUM_BINS = _EXACT + 760  # up to 64 · 1.02^760 = 2.2e8 tokens


class LengthStatistics:
    """Running statistics of accepted replies; `add` takes one reply, `add_entry` one journal line."""

    def __init__(self) -> None:
        self.count = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_cut = 0
        self.num_with_reasoning = 0
        self.num_unclosed = 0
        self.num_repaired_text = 0
        self.num_retried = 0
        self.num_clamped = 0
        self._longest = 0
        self._bins = [0] * _NUM_BINS

    @property
    def mean(self) -> float:
        """Mean answer in tokens, 0.0 before the first."""
        return self.num_tokens / self.count if self.count else 0.0

    @property
    def mean_prompt(self) -> float:
        """Mean prompt of the accepted replies in tokens, 0.0 before the first."""
        return self.num_prompt_tokens / self.count if self.count else 0.0

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Count one line of the journal."""
        length = len(entry["output_ids"])
        self.count += 1
        self.num_tokens += length
        self.num_prompt_tokens += entry["prompt_tokens"]
        self.num_cached_tokens += entry["cached_tokens"]
        self.num_cut += entry["finish_reason"] == "length"
        self.num_with_reasoning += entry["spans"]["reasoning"] is not None
        self.num_unclosed += not entry["is_closed"]
        self.num_repaired_text += entry["text_match"] != "exact"
        self.num_retried += entry["attempt"] > 1
        self.num_clamped += bool(entry.get("is_clamped"))
        self._longest = max(self._longest, length)
        self._bins[_bin(length)] += 1

    def quantile(self, share: float) -> int:
        """Length below which `share` of the replies lie, in tokens; 0 before the first."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self._bins):
            seen += count
            if count and seen >= wanted:
                return min(round(_centre(index)), self._longest)
        return 0

    def figures(self) -> dict[str, float | int]:
        """Flat figures for progress, status and the manifest; before the first reply there are no lengths and no shares."""
        if not self.count:
            return {"replies": 0, "tokens": 0, "prompt_tokens": 0}
        count = self.count
        return {
            "replies": count,
            "tokens": self.num_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "tokens_mean": round(self.mean, 1),
            "tokens_median": self.quantile(0.5),
            "tokens_p90": self.quantile(0.9),
            "tokens_p99": self.quantile(0.99),
            "share_cut_by_length": round(self.num_cut / count, 4),
            "share_with_reasoning": round(self.num_with_reasoning / count, 4),
            "share_cached_tokens": round(self.num_cached_tokens / max(1, self.num_prompt_tokens), 4),
            "text_repaired": self.num_repaired_text,
            "retried": self.num_retried,
            "clamped": self.num_clamped,
        }


def _bin(length: int) -> int:
    if length < _EXACT:
        return length
    return min(_NUM_BINS - 1, _EXACT + int(math.log(length / _EXACT) / _RATIO))


def _centre(index: int) -> float:
    if index < _EXACT:
        return float(index)
    return _EXACT * math.exp((index - _EXACT + 0.5) * _RATIO)
