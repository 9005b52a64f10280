"""The run in tables: lengths, forecast history, training, benchmark; where plots cannot be shown, they are read.

Each table is made from the files it names, so whoever shows tables makes one anew only when they change. Series are
drawn as one line of block characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.operate import series
from eyas.operate.curve_result import RESULT as CURVE
from eyas.operate.curve_result import advice, read_curve
from eyas.operate.prompt_accounts import prompt_accounts
from eyas.operate.wording import bars, curve, duration
from eyas.progress import HISTORY_NAME
from eyas.speculate.report import span
from eyas.workspace import RunFolder

MOST_ROWS = 24
"""Rows of a series: evenly thinned, the last always there."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """Rows under a name, and the headline that says the value."""

    name: str
    headline: str
    rows: Rows


@dataclass(frozen=True)
class Source:
    """A table to be: the files (patterns) it is made from, and what makes it; None while there is nothing to show."""

    patterns: tuple[str, ...]
    make: Callable[[RunFolder], Table | None]

    def stamp(self, run: RunFolder) -> tuple[tuple[str, int, int], ...]:
        """Changes when one of the files does."""
        paths = sorted(path for pattern in self.patterns for path in run.root.glob(pattern))
        return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path in paths for stat in [path.stat()])


def prompts(run: RunFolder) -> Table | None:
    """What phase 1 made of each dataset's rows; numbers alone, so that it may be shown anywhere."""
    found = prompt_accounts(run, sorted(path.parent.name for path in run.root.glob("prompts/*/manifest.json")))
    rows = [account.row() for account in found]
    headline = f"{sum(account.kept for account in found):,} prompts of {sum(account.read for account in found):,} rows"
    return Table("prompts", headline, rows) if rows else None


def lengths(run: RunFolder) -> Table | None:
    """Tokens of prompts and responses per dataset, with a histogram of the responses over powers of two."""
    names = sorted(path.parent.name for path in run.root.glob("prompts/*/manifest.json"))
    found = series.lengths(run, names)
    every = [length for item in found.values() for length in item.responses]
    if not found:
        return None
    bins = np.geomspace(1, max(every, default=1) + 1, 17)
    rows = []
    for name, item in found.items():
        median = {"prompt median": int(np.median(item.prompts)) if item.prompts else None}
        quantiles = np.quantile(item.responses, (0.5, 0.9, 0.99)).astype(int).tolist() if item.responses else [None] * 3
        figures = dict(zip(("response median", "p90", "p99"), quantiles, strict=True))
        drawn = bars(np.histogram(item.responses, bins)[0].tolist()) if item.responses else ""
        longest = max(item.responses, default=None)
        rows.append({"dataset": name, **median, **figures, "longest": longest, f"1 … {int(bins[-1]) - 1:,} tokens": drawn})
    headline = f"response median {int(np.median(every)):,}, longest {max(every):,} tokens" if every else "prompts alone so far"
    return Table("lengths", headline, rows)


def forecast_history(run: RunFolder) -> Table | None:
    """At each time, the hour at which generation was said to end, with its 80 % interval."""
    history = series.forecast_history(run)
    if history is None:
        return None
    rows = [
        {"after": _hours(at), "ends after": _hours(end), "at the earliest": _hours(low), "at the latest (80 %)": _hours(high)}
        for at, end, low, high in _thinned(list(zip(history.hours, history.end, history.low, history.high, strict=True)))
    ]
    last = f"generation ends after {_hours(history.end[-1])} ({_hours(history.low[-1])} to {_hours(history.high[-1])})"
    return Table("forecast", last if history.actual is None else f"generation took {_hours(history.actual)}", rows)


def training(run: RunFolder) -> Table | None:
    """Loss along the steps, and the accept length of each held-out replay beside the step it was made at."""
    steps, replays = series.metrics(run)
    if not steps and not replays:
        return None
    shown = _thinned(steps)
    trained = {row["step"]: row for row in steps}
    at = {row["step"]: row for row in [*shown, *replays]}
    lengths_at = {row["step"]: row["accept_length"] for row in replays}
    rows = [
        {
            "step": step,
            "epoch": at[step]["epoch"] + 1,
            "loss": _rounded(trained.get(step, {}).get("loss")),
            "accept length": _rounded(lengths_at.get(step)),
            "learning rate": f"{rate:.2e}" if (rate := trained.get(step, {}).get("learning_rate")) is not None else None,
        }
        for step in sorted(at)
    ]
    best = max(lengths_at.values(), default=None)
    said = "no replay yet" if best is None else f"best accept length {best:.3f} {curve(_thinned(list(lengths_at.values())))}"
    losses = curve([row["loss"] for row in shown])
    loss = f"loss {steps[-1]['loss']:.3f} at step {steps[-1]['step']:,} {losses}" if steps else ""
    return Table("training", " · ".join(part for part in (said, loss) if part), rows)


def learning_curve(run: RunFolder) -> Table | None:
    """What was measured on the first records, and what the law through it expects of more of them."""
    result = read_curve(run)
    if result is None:
        return None
    measured = [
        {
            "records": p["records"],
            "steps": p["steps"],
            "accept length": p["accept_length"],
            "80 %": "measured",
            "the rest buys": None,
        }
        for p in result["points"]
    ]
    expected = [
        {
            "records": row["records"],
            "steps": row["steps"],
            "accept length": row["accept_length"],
            "80 %": f"{row['low']:.2f}–{row['high']:.2f}",
            "the rest buys": row["rest_buys"],
        }
        for row in result["predictions"]
    ]
    return Table("learning-curve", advice(result), measured + expected)


def benchmark(run: RunFolder) -> Table | None:
    """Accept length per dataset and set, with interval, prediction, drafters without a model, and outputs."""
    try:
        results = read_json(run.benchmark / "results.json")
    except ArtifactError:
        return None
    rows = []
    for kind in ("per_dataset", "per_set"):
        for name, item in results.get(kind, {}).items():
            outputs = item["outputs"]
            rows.append(
                {
                    "prompts": name if kind == "per_dataset" else f"set {name}",
                    "accept length": round(item["accept_length"], 3),
                    "95 %": span(item["interval_95"], 2),
                    "verifications": item["num_verifications"],
                    "predicted": _rounded(item.get("predicted_accept_length")),
                    **{key.replace("_", " "): _rounded(value) for key, value in item["baselines"].items()},
                    "identical / tie / wrong": f"{outputs['identical']} / {outputs['tie']} / {outputs['wrong']}",
                }
            )
    overall, speedup = results["accept_length"]["overall"], results.get("speedup")
    timing = results.get("timing") or [{}]
    spread = f" ({timing[0]['speedup_min']:.2f}–{timing[0]['speedup_max']:.2f})" if timing[0] else ""
    faster = f", speed-up {speedup:.2f}×{spread}" if speedup else ""
    return Table("accept-length", f"accept length {overall:.2f}{faster}, {results['outputs']['wrong']} replies wrong", rows)


SOURCES = (
    Source(("prompts/*/manifest.json",), prompts),
    Source(("prompts/*/manifest.json", "responses/*/manifest.json"), lengths),
    Source((f"progress/{HISTORY_NAME}",), forecast_history),
    Source(("draft/metrics.jsonl",), training),
    Source((CURVE,), learning_curve),
    Source(("benchmark/results.json",), benchmark),
)


def changed_tables(run: RunFolder, seen: dict[Source, Any]) -> Iterator[Table]:
    """The tables whose files have changed since `seen`, which is brought up to date."""
    for source in SOURCES:
        stamp = source.stamp(run)
        if stamp and seen.get(source) != stamp:
            seen[source] = stamp
            if (table := source.make(run)) is not None:
                yield table


def _thinned(rows: list[Any]) -> list[Any]:
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[index] for index in np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int)]


def _hours(hours: float) -> str:
    return duration(hours * 3600)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
