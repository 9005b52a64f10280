"""The vocabulary map: offsets, the fill rule, forced tokens."""

from __future__ import annotations

import numpy as np
import pytest

from eyas.errors import ConfigError
from eyas.merging.vocabulary import build_map


def test_d2t_holds_offsets() -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2447: vocabulary 10, kept 2, 5, 9: d2t is 2, 4, 7."""
    counts = np.zeros(10, dtype=np.int64)
    counts[[2, 5, 9]] = 3
    found = build_map(counts, [], 3)
    assert found.d2t.tolist() == [2, 4, 7]
    assert np.flatnonzero(found.t2d).tolist() == [2, 5, 9]
    assert found.num_filled == 0


def test_ties_go_to_the_lower_id_and_the_fill_takes_the_lowest_absent_ids() -> None:
    counts = np.array([0, 4, 4, 0, 0, 4, 0, 9], dtype=np.int64)
    assert build_map(counts, [], 3).kept.tolist() == [1, 2, 7]
    filled = build_map(counts, [6], 7)
    assert filled.kept.tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert filled.num_filled == 2


def test_forced_tokens_displace_rare_ones_and_coverage_says_so() -> None:
    counts = np.array([5, 3, 1, 0], dtype=np.int64)
    found = build_map(counts, [3], 2)
    assert found.kept.tolist() == [0, 3]
    assert found.coverage(counts) == pytest.approx(5 / 9)
    with pytest.raises(ConfigError, match="alone are 3"):
        build_map(counts, [1, 2, 3], 2)


def test_a_draft_vocabulary_larger_than_the_target_keeps_all() -> None:
    found = build_map(np.zeros(4, dtype=np.int64), [], 9)
    assert found.d2t.tolist() == [0, 0, 0, 0]
