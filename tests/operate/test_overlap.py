"""Which runs may work on later phases while replies are generated: the written rule, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.config import parse_config
from eyas.operate.overlap import may_overlap

ELSEWHERE = {"kind": "sglang", "urls": ["http://10.0.0.7:30000", "http://10.0.0.8:30000"]}
HERE = {"kind": "sglang", "urls": ["http://127.0.0.1:30000"]}
RAY = {"runner": {"kind": "ray", "address": "ray://10.0.0.9:10001"}}


@pytest.mark.parametrize(
    ("sections", "may", "why"),
    [
        ({}, False, "embedded engine"),
        ({"operate": RAY}, False, "embedded engine"),
        ({"server": ELSEWHERE}, True, "no server generates on this machine"),
        ({"server": HERE}, False, "http://127.0.0.1:30000 generates on this machine"),
        ({"server": HERE, "operate": RAY}, True, "Ray cluster ray://10.0.0.9:10001"),
        ({"server": HERE, "operate": {"runner": {"kind": "ray"}}}, False, "generates on this machine"),
        ({"server": ELSEWHERE, "hidden": {"source": "sglang"}}, False, "generate first"),
        ({"server": ELSEWHERE, "hidden": {"source": "sglang", "urls": ["http://10.0.0.9:30000"]}}, True, "servers of its own"),
        ({"server": ELSEWHERE, "hidden": {"source": "sglang", "urls": ["http://10.0.0.8:30000/"]}}, False, "would do both"),
        ({"server": ELSEWHERE, "hidden": {"codec": "int4_top"}}, False, "needs the vocabulary that the merge makes"),
        ({"operate": {"overlap": "yes"}}, True, "operate.overlap is yes"),
        ({"server": ELSEWHERE, "operate": {"overlap": "no"}}, False, "operate.overlap is no"),
    ],
)  # fmt: skip
def test_overlap_follows_the_processors(sections: dict[str, Any], may: bool, why: str) -> None:
    answer, reason = may_overlap(parse_config(sections, where="test"))
    assert answer is may
    assert why in reason
