"""Length statistics and what one record sends."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.generation.sampling import record_sampling
from eyas.generation.statistics import LengthStatistics


def entry(length: int) -> dict[str, Any]:
    return {
        "output_ids": [5] * length,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "finish_reason": "length",
        "spans": {"reasoning": None},
        "is_closed": True,
        "text_match": "exact",
        "attempt": 1,
    }


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 10_240])
def test_no_quantile_exceeds_the_longest_reply(length: int) -> None:
    statistics = LengthStatistics()
    for _ in range(5):
        statistics.add_entry(entry(length))
    assert statistics.quantile(0.5) == pytest.approx(length, rel=0.03)
    assert statistics.quantile(0.99) <= length


def test_heldout_records_are_greedy_and_training_records_sampled() -> None:
    """Acceptance is predicted on greedy replies, so the replies that predict it must be greedy."""
    sampling = {"temperature": 0.8, "top_p": 0.9}
    train = record_sampling(sampling, "train", max_new_tokens=7, seed=3)
    assert train == {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 7, "sampling_seed": 3}
    assert record_sampling(sampling, "heldout", max_new_tokens=7, seed=3) == {**train, "temperature": 0.0}
