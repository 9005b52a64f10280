"""The report's plots as inline SVG that takes its colours from the page, so one drawing suits light and dark.

matplotlib draws with stand-in colours, which are then replaced by CSS variables; text stays text. No
metadata, no document type, no address: the SVG needs nothing from a network.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eyas.operate.series import ForecastHistory, Lengths, Throughput

INK, FAINT, GRID = "#010203", "#040506", "#070809"
SERIES = tuple(f"#0a0b{number:02x}" for number in range(8))
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--grid)"} | {
    colour: f"var(--s{number})" for number, colour in enumerate(SERIES)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Interval:
    """One row of a dot plot: a value, its interval if there is one, and marks beside it."""

    name: str
    value: float
    ends: list[float] | None
    marks: dict[str, float]


def length_histograms(found: dict[str, Lengths]) -> str:
    """A panel per dataset: prompts and responses over a logarithmic axis of tokens."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    every = [value for item in found.values() for value in (*item.prompts, *item.responses)]
    edges = np.geomspace(max(1, min(every)), max(every) + 1, 33)
    with _drawing("lengths", 2.4 * max(columns, 2), 1.55 * rows + 0.5) as (figure, output):
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
        for axis, (name, item) in zip(axes, found.items(), strict=False):
            for values, style in (
                (item.responses, {"color": SERIES[0], "alpha": 0.55, "label": "responses"}),
                (item.prompts, {"histtype": "step", "color": SERIES[1], "linewidth": 1.4, "label": "prompts"}),
            ):
                if values:
                    axis.hist(values, bins=edges, weights=np.full(len(values), 100 / len(values)), **style)
            axis.set_title(name)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(_thousands))
            axis.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        figure.supxlabel("tokens", color=FAINT, fontsize=9)
        figure.supylabel("% of records", color=FAINT, fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
    return output[0]


def training_curves(rows: list[dict[str, Any]], replays: list[dict[str, Any]]) -> str:
    """Loss per unroll step, share of right tokens per unroll step, and the held-out accept length, over optimizer steps."""
    with _drawing("training", 12.4, 2.9) as (figure, output):
        loss, per_dataset, accuracy, accept = figure.subplots(1, 4)
        _step_lines(loss, rows, "step_loss")
        loss.set_title("loss per unroll step")
        _dataset_lines(per_dataset, rows)
        per_dataset.set_title("loss per dataset, step 0")
        _step_lines(accuracy, rows, "step_accuracy")
        accuracy.set_title("share of right tokens, training")
        accuracy.set_ylim(bottom=0)
        if replays:
            names = sorted({name for row in replays for name in row.get("per_dataset", {})})
            for name in names:
                points = [(row["step"], row["per_dataset"][name]["accept_length"]) for row in replays if name in row["per_dataset"]]
                accept.plot(*zip(*points, strict=True), color=GRID, linewidth=1.2)
            steps = [row["step"] for row in replays]
            accept.plot(
                steps, [row["accept_length"] for row in replays], color=SERIES[0], marker="o", markersize=3.5, label="overall"
            )
            best = max(replays, key=lambda row: row["accept_length"])
            accept.annotate(
                f"{best['accept_length']:.2f}",
                (best["step"], best["accept_length"]),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
                color=INK,
                fontsize=9,
            )
            if names:
                accept.plot([], [], color=GRID, label="each dataset")
            accept.legend(loc="lower right")
        accept.set_title("accept length, held-out replay")
        for axis in (loss, per_dataset, accuracy, accept):
            axis.set_xlabel("optimizer step")
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
            axis.margins(y=0.12)
    return output[0]


def learning_curve(result: dict[str, Any], reached: tuple[int, float] | None) -> str:
    """Accept length over training records: measured, expected with its 80 % interval, and what a finished training reached."""
    with _drawing("learning-curve", 7.2, 3.0) as (figure, output):
        axis = figure.subplots()
        rows = result["predictions"]
        records = [row["records"] for row in rows]
        axis.fill_between(
            records,
            [row["low"] for row in rows],
            [row["high"] for row in rows],
            color=SERIES[0],
            alpha=0.15,
            linewidth=0,
            label="80 %",
        )
        axis.plot(records, [row["accept_length"] for row in rows], color=SERIES[0], label="expected")
        most = {point["records"]: point["steps"] for point in result["points"]}
        for number, is_full in enumerate((True, False)):
            points = [point for point in result["points"] if (point["steps"] == most[point["records"]]) == is_full]
            axis.errorbar(
                [point["records"] for point in points],
                [point["accept_length"] for point in points],
                yerr=[point["error"] for point in points],
                fmt="o" if is_full else "v",
                color=SERIES[number],
                markersize=4,
                linewidth=1,
                label="measured, all steps" if is_full else "measured, fewer steps",
            )
        axis.axvline(result["total_records"], color=GRID, linewidth=1.2, linestyle="--")
        if reached is not None:
            axis.plot(*reached, "d", color=SERIES[2], markersize=6, label="reached")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(_thousands))
        axis.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axis.set_xlabel("training records")
        axis.set_title("accept length, held-out replay")
        axis.legend(loc="lower right", ncols=2)
    return output[0]


def accept_lengths(rows: Sequence[Interval]) -> str:
    """Accept length with its 95 % interval per group of prompts, beside baselines and the prediction."""
    names = list(dict.fromkeys(name for row in rows for name in row.marks))
    markers = ("v", "x", "d", "s")
    with _drawing("accept", 7.2, 0.34 * len(rows) + 1.2) as (figure, output):
        axis = figure.subplots()
        heights = np.arange(len(rows))[::-1]
        ends = [row.ends or [row.value, row.value] for row in rows]
        axis.hlines(heights, [low for low, _ in ends], [high for _, high in ends], color=SERIES[0], linewidth=2.2, alpha=0.5)
        axis.plot([row.value for row in rows], heights, "o", color=SERIES[0], markersize=6, label="draft, with 95 % interval")
        for number, name in enumerate(names):
            points = [(row.marks[name], height) for row, height in zip(rows, heights, strict=True) if name in row.marks]
            axis.plot(*zip(*points, strict=True), markers[number % 4], color=SERIES[number + 1], markersize=7, label=name)
        axis.set_yticks(heights, [row.name for row in rows], color=INK)
        axis.set_xlabel("tokens per verification, bonus included (1 = nothing accepted)")
        axis.set_xlim(left=min(0.97, *(low - 0.02 for low, _ in ends)))
        axis.grid(axis="y", visible=False)
        axis.margins(y=0.08 if len(rows) > 4 else 0.3)
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return output[0]


def speedup_curves(grid: Sequence[dict[str, Any]]) -> str:
    """What each shape of the draft gains by requests in flight, its slowest and fastest pair of blocks as a band, and
    the share of drafts accepted at each position."""
    with _drawing("grid", 7.2, 2.8) as (figure, output):
        speed, positions = figure.subplots(1, 2, width_ratios=(3, 2))
        loads = sorted({point["concurrency"] for shape in grid for point in shape["timing"]})
        for number, shape in enumerate(grid):
            colour, points = SERIES[number % 8], sorted(shape["timing"], key=lambda point: point["concurrency"])
            places = [loads.index(point["concurrency"]) for point in points]
            low, high = ([point[key] for point in points] for key in ("speedup_min", "speedup_max"))
            speed.plot(places, [point["speedup"] for point in points], "o-", color=colour, markersize=4, label=shape["shape"])
            speed.vlines(places, low, high, color=colour, linewidth=4, alpha=0.25)
            rates = shape["position_rates"]
            positions.plot(range(1, len(rates) + 1), rates, "o-", color=colour, markersize=4)
        speed.axhline(1.0, color=FAINT, linewidth=1.0, linestyle="--")
        speed.set_xticks(range(len(loads)), [str(load) for load in loads])
        speed.set_xlabel("requests in flight")
        speed.set_title("speed-up over the target alone")
        positions.set_ylim(0, 1)
        positions.set_xlabel("position of the draft")
        positions.xaxis.set_major_locator(MaxNLocator(integer=True))
        positions.set_title("accepted, given those before it")
        figure.legend(*speed.get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return output[0]


def throughput_curve(found: Throughput) -> str:
    """Reply tokens per second over the time of generation."""
    with _drawing("throughput", 5.2, 2.6) as (figure, output):
        axis = figure.subplots()
        unit, scale = ("hours", 60.0) if found.minutes[-1] > 180 else ("minutes", 1.0)
        times = [minutes / scale for minutes in found.minutes]
        axis.plot(times, found.tokens_per_s, color=SERIES[0])
        axis.fill_between(times, found.tokens_per_s, color=SERIES[0], alpha=0.12, linewidth=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(f"{unit} since generation began")
        axis.set_ylabel("reply tokens/s")
    return output[0]


def forecast_curve(found: ForecastHistory) -> str:
    """When generation was said to end, with its interval, against when it ended; what lies above three times that is counted."""
    with _drawing("forecast", 5.2, 2.6) as (figure, output):
        axis = figure.subplots()
        unit, scale = ("hours", 1.0) if found.hours[-1] > 3 else ("minutes", 60.0)
        times = [hour * scale for hour in found.hours]
        axis.fill_between(
            times,
            [value * scale for value in found.low],
            [value * scale for value in found.high],
            color=SERIES[0],
            alpha=0.15,
            linewidth=0,
            label="80 % interval",
        )
        axis.plot(times, [value * scale for value in found.end], color=SERIES[0], label="forecast")
        if found.actual is not None:
            axis.axhline(found.actual * scale, color=SERIES[1], linewidth=1.2, linestyle="--", label="as it came")
        top = 3 * (found.end[-1] if found.actual is None else found.actual)
        above = [value for value in found.end if value > top]
        axis.set_ylim(0, top * scale if max(found.high) > top else None)
        if above:
            axis.set_title(f"{len(above)} of {len(found.end)} forecasts lie above, up to {max(above) * scale:,.0f} {unit}")
        axis.set_xlabel(f"{unit} since generation began")
        axis.set_ylabel(f"end, in {unit}")
        axis.legend(loc="lower right")
    return output[0]


def _step_lines(axis: Any, rows: list[dict[str, Any]], key: str) -> None:
    kept = [row for row in rows if row.get(key)]
    for step in range(max((len(row[key]) for row in kept), default=0)):
        points = [(row["step"], row[key][step]) for row in kept if step < len(row[key])]
        axis.plot(*zip(*points, strict=True), color=SERIES[step % 8], label=f"step {step}", marker="o" if len(points) < 3 else None)
    if kept:
        axis.legend(ncols=2, loc="best")


def _dataset_lines(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Step 0's loss of each dataset, as the mean of up to 60 equal spans: single lines hold few records of one dataset."""
    names = sorted({name for row in rows for name in row.get("per_dataset", {})})
    span = max(1, -(-len(rows) // 60))
    for number, name in enumerate(names):
        points = []
        for start in range(0, len(rows), span):
            found = [row["per_dataset"][name] for row in rows[start : start + span] if name in row.get("per_dataset", {})]
            kept = sum(item["kept"] for item in found)
            if kept:
                mean = sum(item["step_loss"][0] * item["kept"] for item in found) / kept
                points.append((rows[min(start + span, len(rows)) - 1]["step"], mean))
        if points:
            axis.plot(*zip(*points, strict=True), color=SERIES[number % 8], label=name, marker="o" if len(points) < 3 else None)
    if names:
        axis.legend(loc="best", fontsize=6)


def _thousands(value: float, _: Any) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


@contextmanager
def _drawing(name: str, width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure of `width` × `height` inches; its SVG is appended to the list when the block ends."""
    output: list[str] = []
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(width, height))
        yield figure, output
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    output.append(_inline(buffer.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(
        r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", lambda match: f"font{match[1] or ''}: {match[2]}var(--font)", svg
    )
    head, rest = svg.split(">", 1)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', head)[1])  # type: ignore[index]  # matplotlib always writes one
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{name}" style="max-width: {1.5 * width:.0f}px">{rest}'.strip()
