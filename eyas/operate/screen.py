"""The run on a terminal: one view, printed once by `eyas status` and kept live by `eyas watch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eyas.operate.forecast import Forecast
from eyas.operate.messages import ProgressMessage
from eyas.operate.phases import TITLES
from eyas.operate.status import DatasetStatus, PhaseStatus, RunStatus, read_status
from eyas.operate.tables import training
from eyas.operate.wording import describe_amount, describe_figures, duration, number, size
from eyas.speculate.report import span
from eyas.workspace import RunFolder

COLOURS = {
    "done": "green",
    "running": "cyan",
    "stalled": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "damaged": "red",
    "outdated": "yellow",
    "waiting": "dim",
    "new": "dim",
}


def watch(root: Path, *, every_s: float) -> None:
    """Show the run until it is done or Ctrl-C; reads the folder every `every_s` seconds."""
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            status = read_status(root)
            live.update(render_status(status), refresh=True)
            if status.state == "done":
                break
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                break
    console.print(render_status(status))


def render_status(status: RunStatus) -> RenderableType:
    """Headline, phases, datasets, disk and alarms."""
    headline = Text.assemble(
        (status.name, "bold"), "  ", (status.state, COLOURS[status.state]), ("  " + status.at.replace("+00:00", "Z"), "dim")
    )
    parts: list[RenderableType] = [headline, _phases(status)]
    if any(dataset.prompts or dataset.responses for dataset in status.datasets):
        parts.append(_datasets(status.datasets))
    if status.servers:
        parts.append(_servers(status.servers))
    parts.append(Text(_disk(status)))
    if status.results:
        parts.append(Text(_results(status.results), style="bold green"))
    parts += [Text(f"! {alarm}", style="bold red") for alarm in status.alarms]
    return Group(*parts)


def render_result(run: RunFolder) -> RenderableType:
    """What a run has come to: its state, its figures, and the curves of its training."""
    lines: list[RenderableType] = [render_status(read_status(run.root))]
    if (table := training(run)) is not None:
        lines.append(Text(f"training: {table.headline}"))
    return Group(*lines)


def render_outlook(outlook: Forecast, free_bytes: int) -> RenderableType:
    """What a run is expected to hold and to cost, before it starts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("phase", "records", "tokens", "disk", "at most", "time", "rests on"):
        table.add_column(name, justify="left" if name in ("phase", "rests on") else "right", no_wrap=name != "rests on")
    for item in outlook.phases:
        amounts = [f"{item.records:,}", f"{item.tokens:,}", size(item.disk_bytes), size(item.disk_bytes_at_most)]
        table.add_row(
            TITLES[item.phase],
            *(amounts if item.is_known else ["?"] * len(amounts)),
            "?" if item.hours is None else duration(item.hours * 3600),
            item.basis,
        )
    hours = "unknown: some phase was never measured" if outlook.hours is None else duration(outlook.hours * 3600)
    disk = f"{size(outlook.disk_bytes_to_write)}, at most {size(outlook.disk_bytes_at_most)}"
    if not outlook.is_known:
        disk = f"at least {size(outlook.disk_bytes_to_write)}, unknown before phase 1 has counted the prompts"
    summary = f"in all: time {hours}; disk {disk}, of {size(free_bytes)} free"
    return Group(table, Text(summary, style="bold"), Text(f"tokens: {outlook.volumes_basis}", style="dim"))


def _phases(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("phase", "state", "in", "done", "rejected", "pending", "progress"):
        table.add_column(
            name, justify="right" if name in ("in", "done", "rejected", "pending") else "left", no_wrap=name != "progress"
        )
    for phase in status.phases:
        counts = [f"{phase.counts[key]:,}" if phase.counts else "" for key in ("in", "done", "rejected", "pending")]
        table.add_row(TITLES[phase.phase], Text(phase.state, style=COLOURS[phase.state]), *counts, _progress(phase))
    return table


def _progress(phase: PhaseStatus) -> str:
    """What moves: share, rate and remaining time; for a phase at rest, why records were rejected."""
    if not phase.progress:
        return describe_rejects(phase)
    moving = [piece for piece in phase.progress if not piece.is_final] or phase.progress
    done, total = sum(piece.done for piece in moving), sum(piece.total for piece in moving)
    share = f" ({done / total:.0%})" if total else ""
    piece = f"{moving[0].name}: " if len(moving) == 1 and moving[0].name else ""
    words = [f"{piece}{describe_amount(done, total, moving[0].unit)}{share}", *_outlook(moving[-1])]
    return "  ".join([*words, describe_figures(moving[-1].figures)] if len(moving) == 1 else words)


def describe_rejects(phase: PhaseStatus) -> str:
    """Reasons and their counts, the most frequent first."""
    reasons = sorted(phase.rejected_by_reason.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in reasons)


def describe_end(phase: PhaseStatus) -> str:
    """A finished phase in one sentence: how long it took and what became of its records, as its manifests say."""
    counts = phase.counts
    if not counts or phase.worked_s is None:
        return f"{phase.phase} done"
    rejects = describe_rejects(phase)
    rejected = f"{counts['rejected']:,} rejected{f' ({rejects})' if rejects else ''}"
    return f"{phase.phase} done in {duration(phase.worked_s)}: {counts['in']:,} in, {counts['done']:,} done, {rejected}"


def _outlook(piece: ProgressMessage) -> list[str]:
    """Throughput where it is stated, remaining time, and its 80 % interval where it is stated."""
    figures = piece.figures
    words = [f"{number(figures['run_tokens_per_s'])} tokens/s"] if "run_tokens_per_s" in figures else []
    if (left := piece.remaining_s) is not None and not piece.is_final:
        ends = [duration(float(figures[key])) for key in ("remaining_low_s", "remaining_high_s") if key in figures]
        interval = f" ({' to '.join(ends)})" if ends else ""
        words.append(f"{duration(left)} left{interval}")
    elif "remaining_s" in figures and not piece.is_final:
        words.append(f"time left {figures['remaining_s']} yet")
    return words


def _datasets(datasets: list[DatasetStatus]) -> Table:
    """Prompts and responses of each dataset, lengths in tokens; a column that is empty or zero throughout is left out."""
    columns: dict[str, list[str]] = {"dataset": [dataset.dataset for dataset in datasets]}
    columns["prompts"] = [_count(dataset.prompts, "done") for dataset in datasets]
    for key in ("done", "rejected", "pending"):
        columns[key] = [_count(dataset.responses, key) for dataset in datasets]
    columns["in flight"] = [_figure(dataset.figures, "in_flight") for dataset in datasets]
    for key in ("median", "mean", "p90", "p99"):
        columns[key] = [_figure(dataset.figures, f"tokens_{key}") for dataset in datasets]
    columns["cut"] = [_share(dataset.figures, "share_cut_by_length") for dataset in datasets]
    columns["reasoning"] = [_share(dataset.figures, "share_with_reasoning") for dataset in datasets]
    columns["cached"] = [_share(dataset.figures, "share_cached_tokens") for dataset in datasets]
    columns["gates"] = [str(dataset.figures.get("gates", "")) for dataset in datasets]
    shown = {name: values for name, values in columns.items() if any(value not in ("", "0", "0%") for value in values)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in shown:
        table.add_column(name, justify="left" if name == "dataset" else "right", no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def _servers(servers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("server", "state", "in flight", "limit", "waiting", "KV cache", "tokens/s", "retracted", "done"):
        table.add_column(name, justify="left" if name in ("server", "state") else "right", no_wrap=True)
    for server in servers:
        table.add_row(
            server["url"],
            server["state"],
            *(_figure(server, key) for key in ("in_flight", "limit", "waiting")),
            _share(server, "token_usage"),
            *(_figure(server, key) for key in ("tokens_per_s", "retracted", "done")),
        )
    return table


def _disk(status: RunStatus) -> str:
    wanted = status.forecast.get("disk_bytes_to_write")
    rest = f", about {size(wanted)} still to be written" if wanted else ""
    hours = status.forecast.get("hours")
    left = f"; {duration(hours * 3600)} left in all" if hours and status.state != "done" else ""
    return f"disk: {size(status.disk['used_bytes'])} used, {size(status.disk['free_bytes'])} free{rest}{left}"


def _results(results: dict[str, Any]) -> str:
    """What the benchmark found, a line each: accept length, speed-up, replies, and whether the draft may be served."""
    lines = []
    if accept := results.get("accept_length"):
        beside = [f"95 %: {span(accept.get('interval_95'), 2)}"]
        if predicted := results.get("predicted_accept_length"):
            beside.append(f"predicted {predicted:.3f}")
        beside += [f"{name.replace('_', ' ')} {value:.3f}" for name, value in results.get("baselines", {}).items()]
        lines.append(f"accept length {accept['overall']:.3f} ({'; '.join(beside)})")
    if results.get("timing"):
        point = results["timing"][0]
        spread = f"{point['speedup_min']:.2f}–{point['speedup_max']:.2f} over {point['block_pairs']} pairs of blocks"
        lines.append(f"speed-up {point['speedup']:.2f}× at {point['concurrency']} in flight ({spread})")
    if outputs := results.get("outputs"):
        lines.append(
            f"{outputs['checked']:,} replies with the draft beside the target's own: {outputs['identical']:,} identical, "
            f"{outputs['tie']:,} ties, {outputs['wrong']:,} wrong"
        )
    if deployment := results.get("deployment"):
        lines.append(f"the draft may {'' if deployment['serves_draft'] else 'not '}be served: {deployment['reason']}")
    return "\n".join(lines)


def _count(counts: dict[str, int], key: str) -> str:
    return f"{counts[key]:,}" if key in counts else ""


def _figure(figures: dict[str, Any], key: str) -> str:
    return number(figures[key]) if key in figures else ""


def _share(figures: dict[str, Any], key: str) -> str:
    return f"{figures[key]:.0%}" if key in figures else ""
