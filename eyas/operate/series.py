"""The long series behind the report's plots, read from the files of a run; each function names its file.

Lengths come from the rows themselves: Parquet offsets for prompts, the first 5,000 rows of each dataset
for responses (rows stand in order of random ids, so a prefix is an honest sample).
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.files import read_json_lines
from eyas.operate.messages import read_history
from eyas.operate.phases import phase_of_stage
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 5_000
Floats = list[float]


@dataclass
class Lengths:
    """Tokens of prompts and of responses of one dataset."""

    prompts: list[int] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)


def lengths(run: RunFolder, datasets: list[str]) -> dict[str, Lengths]:
    """Datasets that have any: from `prompts.parquet` and `tokenized_data.jsonl` or, before that exists, the journal."""
    found = {name: Lengths(_prompt_lengths(run, name), _response_lengths(run, name)) for name in datasets}
    return {name: item for name, item in found.items() if item.prompts or item.responses}


@dataclass
class Throughput:
    """Reply tokens per second over all datasets, at minutes since generation began."""

    minutes: Floats
    tokens_per_s: Floats


def throughput(run: RunFolder) -> Throughput | None:
    """From `progress/history.jsonl`: differences of the datasets' token counts, summed over at most 120 equal spans.

    A span lasts 15 s at least where the run allows: tokens count as their reply ends, and equal caps end many at once.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for message in read_history(run.progress):
        tokens = message.figures.get("tokens")
        if phase_of_stage(message.stage) == "generate" and isinstance(tokens, (int, float)):
            points.setdefault(message.name, []).append((datetime.fromisoformat(message.at).timestamp(), float(tokens)))
    starts = [series[0][0] for series in points.values()]
    ends = [series[-1][0] for series in points.values()]
    if not starts or max(ends) - min(starts) < 2.0:
        return None
    edges = np.linspace(min(starts), max(ends), min(121, max(3, int((max(ends) - min(starts)) / 15))))
    totals = np.zeros(len(edges))
    for series in points.values():
        times, tokens_seen = np.array(series).T
        totals += np.interp(edges, times, np.maximum.accumulate(tokens_seen))
    rates = np.diff(totals) / np.diff(edges)
    middles = (edges[1:] + edges[:-1]) / 2 - edges[0]
    return Throughput((middles / 60).tolist(), rates.tolist())


@dataclass
class ForecastHistory:
    """The hour at which generation was said to end, over the hours it had run; low and high bound an 80 % interval."""

    hours: Floats
    end: Floats
    low: Floats
    high: Floats
    actual: float | None


def forecast_history(run: RunFolder) -> ForecastHistory | None:
    """From `progress/history.jsonl`: `remaining_s` and its bounds `remaining_low_s`, `remaining_high_s`, stated of all datasets."""
    messages = [message for message in read_history(run.progress) if phase_of_stage(message.stage) == "generate"]
    told = [message for message in messages if isinstance(message.figures.get("remaining_s"), (int, float))]
    # A forecast stands in every message until the next one is made; it holds for the time at which it was made.
    stated = [
        b for a, b in zip([None, *told], told, strict=False) if a is None or a.figures["remaining_s"] != b.figures["remaining_s"]
    ]
    if len(stated) < 2:
        return None
    started = min(datetime.fromisoformat(message.started_at or message.at) for message in messages)
    history = ForecastHistory([], [], [], [], None)
    for message in stated:
        elapsed_s = (datetime.fromisoformat(message.at) - started).total_seconds()
        history.hours.append(elapsed_s / 3600)
        for ends, key in ((history.end, "remaining_s"), (history.low, "remaining_low_s"), (history.high, "remaining_high_s")):
            ends.append((elapsed_s + float(message.figures.get(key, message.figures["remaining_s"]))) / 3600)
    finals = {message.name: message for message in messages if message.is_final}
    if finals and len(finals) == len({message.name for message in messages}):
        history.actual = max((datetime.fromisoformat(item.at) - started).total_seconds() for item in finals.values()) / 3600
    return history


_FIGURES = {"train": ("step", "loss"), "heldout": ("step", "accept_length")}
"""What each kind of row is drawn from; `json` reads numbers that are none as floats."""


def metrics(run: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, held-out replays) of `draft/metrics.jsonl`; a torn line, or one without its figures, is passed over."""
    path = run.draft / "metrics.jsonl"
    rows = []
    for _, line in read_json_lines(path) if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        wanted = _FIGURES.get(str(row.get("kind")), ()) if isinstance(row, dict) else ()
        if wanted and all(isinstance(row.get(key), (int, float)) and math.isfinite(row[key]) for key in wanted):
            rows.append(row)
    return [row for row in rows if row.get("kind") == "train"], [row for row in rows if row.get("kind") == "heldout"]


def _prompt_lengths(run: RunFolder, name: str) -> list[int]:
    path = run.prompts(name) / "prompts.parquet"
    if not path.is_file():
        return []
    try:
        column = pq.read_table(path, columns=["input_ids"]).column("input_ids")
    except (pa.ArrowException, OSError) as error:
        logger.warning("no prompt lengths in the report file=%s error=%s", path, error)
        return []
    return [length for chunk in column.chunks for length in chunk.value_lengths().to_pylist()]


def _response_lengths(run: RunFolder, name: str) -> list[int]:
    folder = run.responses(name)
    tokenized = folder / "tokenized_data.jsonl"
    paths = [tokenized] if tokenized.is_file() else sorted(folder.glob("journal-*.jsonl"))
    found = []
    for path in paths:
        for number, line in read_json_lines(path):
            if number > SAMPLE_ROWS:
                break
            try:
                row = json.loads(line)
                found.append(len(row["output_ids"]) if "output_ids" in row else len(row["input_ids"]) - row["prompt_tokens"])
            except (ValueError, KeyError, TypeError):
                continue  # a reject, or a torn tail
    return found
