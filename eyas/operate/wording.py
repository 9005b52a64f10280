"""Numbers, spans of time and sizes as a person says them: one spelling for terminal, plan and report."""

from __future__ import annotations

SHOWN_ELSEWHERE = {
    *("done", "rejected", "pending", "retries", "replies", "tokens", "prompt_tokens"),
    *("run_tokens_per_s", "remaining_s", "remaining_low_s", "remaining_high_s"),
}
"""Figures of a progress message that have a place of their own, or would only take room, in one line."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def number(value: float | int | str) -> str:
    """A figure in at most four significant digits, with separators; text as it stands."""
    if isinstance(value, float) and value != int(value):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else value


def duration(seconds: float) -> str:
    """A span of time: 40 s, 12 min, 3.5 h, 2.4 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


def size(num_bytes: float) -> str:
    """Bytes in powers of 1,000: 12 B, 3.4 MB, 1.2 TB."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(value) >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def describe_amount(done: float, total: float, unit: str) -> str:
    """How much of a piece of work is done: 24 of 192 records, 1.2 MB of 3 MB; without a total while there is none."""
    if unit == "bytes":
        return f"{size(done)} of {size(total)}"
    return f"{done:,.0f} of {total:,.0f} {unit}" if total else f"{done:,.0f} {unit}"


def describe_figures(figures: dict[str, float | int | str], limit: int = 3) -> str:
    """The first few figures of a progress message as words; counts and remaining time have places of their own."""
    shown = [
        (key.replace("_", " "), value)
        for key, value in figures.items()
        if key not in SHOWN_ELSEWHERE and not key.startswith("gate_")
    ]
    return ", ".join(f"{key}: {value}" if isinstance(value, str) else f"{key} {number(value)}" for key, value in shown[:limit])


def bars(counts: list[int] | list[float]) -> str:
    """Counts as one line of block characters, the tallest full; an empty bin stays blank."""
    top = max(counts, default=0)
    return "".join(_BLOCKS[0 if not count else max(1, round(8 * count / top))] for count in counts)


def curve(values: list[float]) -> str:
    """A series as one line of block characters from its lowest to its highest value; small changes of large values show."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(_BLOCKS[1 + (round(7 * (value - low) / (high - low)) if high > low else 0)] for value in values)
