"""Reading of `/metrics`: Prometheus text into numbers, summed over ranks. Only what Eyas looks at."""

from __future__ import annotations

import math
import re

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)")


def parse_metrics(text: str) -> dict[str, float]:
    """Sum of every sample by name, without the `sglang:` prefix; NaN and infinite samples are left out."""
    totals: dict[str, float] = {}
    for line in text.split("\n"):
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            name = match["name"].removeprefix("sglang:")
            totals[name] = totals.get(name, 0.0) + value
    return totals
