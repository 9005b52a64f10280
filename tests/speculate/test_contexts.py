"""Accept length by length of the context, by hand."""

from __future__ import annotations

import pytest

from eyas.speculate.contexts import by_context
from eyas.speculate.results import Row
from tests.speculate.test_results import row


def sized(prompt: int, reply: int, counts: tuple[int, int]) -> Row:
    return row(f"{prompt}", "own", counts, prompt_ids=[1] * prompt, reference_ids=[2] * reply, loop_free_tokens=reply)


def test_bands_pool_raw_counts_and_mark_what_no_trained_record_reached() -> None:
    rows = [
        sized(60, 40, (10, 10)),  # 100 tokens: the longest trained record, and so not longer
        sized(61, 39, (30, 10)),
        sized(101, 1, (8, 2)),
        sized(900, 50, (10, 0)),
    ]
    trained, beyond, far = by_context(rows, 100)
    assert (trained["above"], trained["up_to"], trained["is_longer_than_training"]) == (50, 100, False)
    assert trained["accept_length"] == pytest.approx(1 + 20 / 40)
    assert trained["num_requests"] == 2
    assert (beyond["up_to"], beyond["is_longer_than_training"], beyond["accept_length"]) == (200, True, pytest.approx(1.25))
    assert (far["above"], far["up_to"], far["accept_length"]) == (200, None, 1.0)
    assert far["is_longer_than_training"]


def test_every_reply_is_in_one_band() -> None:
    rows = [sized(size, 1, (1, 0)) for size in range(1, 60)]
    bands = by_context(rows, 13)
    assert sum(band["num_requests"] for band in bands) == len(rows)
    assert [band["above"] for band in bands[1:]] == [band["up_to"] for band in bands[:-1]]
