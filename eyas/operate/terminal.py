"""What a person sees while a phase runs: bars on a terminal, plain lines every 20 s elsewhere.

Both show count, rate and remaining time. A phase that knows better than a straight line says so in its
figures (`remaining_s`: seconds, or a word while it cannot know), and that is shown instead. What has ended
stands as one line, without a time: how long a phase took is said once, from its manifests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from eyas.operate.wording import describe_amount, describe_figures, duration, size
from eyas.progress import Progress, Report


@dataclass(frozen=True)
class Terminal:
    """The two ways to speak to the operator: progress, and a sentence."""

    report: Report
    say: Callable[[str], None]


@contextmanager
def terminal(*, every_s: float = 20.0) -> Iterator[Terminal]:
    """This process's standard error: bars if it is a terminal, otherwise a line every `every_s` seconds."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Terminal(PlainLines(every_s=every_s), lambda text: print(text, file=sys.stderr, flush=True))
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[pace]}"),
        TextColumn("[dim]{task.fields[figures]}"),
    )
    with Bars(*columns, console=console, refresh_per_second=4) as bars:
        yield Terminal(TerminalBars(bars), lambda text: bars.console.print(text, markup=False))


class Pace:
    """Rate and remaining time of each piece of work, from what this process saw of it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[float, int]] = {}

    def describe(self, progress: Progress, seconds: float) -> str:
        """For instance "3.1/s, 2 min left"; `seconds` is a monotonic clock."""
        started_s, started_done = self._first.setdefault((progress.stage, progress.name), (seconds, progress.done))
        elapsed_s, made = seconds - started_s, progress.done - started_done
        if progress.is_final or made <= 0 or elapsed_s <= 0:
            return ""
        rate = made / elapsed_s
        remaining = progress.figures.get("remaining_s", (progress.total - progress.done) / rate)
        left = f", {duration(float(remaining))} left" if not isinstance(remaining, str) and progress.total else ""
        if progress.unit == "bytes":
            return f"{size(rate)}/s{left}"
        return f"{rate:,.1f}/s{left}" if rate >= 1 else f"{rate * 60:,.1f}/min{left}"


class PlainLines:
    """One line per piece of work when it starts, every `every_s` seconds, and when it ends."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._shown: dict[tuple[str, str], float] = {}
        self._ended: set[tuple[str, str]] = set()
        self._pace = Pace()
        self._lock = threading.Lock()

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            key, seconds = (progress.stage, progress.name), time.monotonic()
            pace = self._pace.describe(progress, seconds)
            is_due = key not in self._shown or seconds - self._shown[key] >= self._every_s
            if not (is_due or progress.is_final) or key in self._ended:
                return
            self._shown[key] = seconds
            if progress.is_final:
                self._ended.add(key)
            print(line(progress, pace), file=sys.stderr, flush=True)


class TerminalBars:
    """One bar per piece of work that moves; one that has ended becomes a line above the bars."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._ended: set[tuple[str, str]] = set()
        self._pace = Pace()
        self._lock = threading.Lock()

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            key = (progress.stage, progress.name)
            if key in self._ended:
                return
            if progress.is_final:
                self._ended.add(key)
                if key in self._tasks:
                    self._bars.remove_task(self._tasks[key])
                self._bars.console.print(line(progress), markup=False)
                return
            shown = {
                "completed": progress.done,
                "total": max(progress.total, progress.done),
                "amount": describe_amount(progress.done, progress.total, progress.unit),
                "pace": self._pace.describe(progress, time.monotonic()),
                "figures": describe_figures(progress.figures),
            }
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task(title(progress), **shown)  # type: ignore[arg-type]
            else:
                self._bars.update(self._tasks[key], **shown)  # type: ignore[arg-type]


def title(progress: Progress) -> str:
    """Stage and piece, as one name."""
    return f"{progress.stage} {progress.name}" if progress.name else progress.stage


def line(progress: Progress, pace: str = "") -> str:
    """A state of one piece of work as one line."""
    parts = [describe_amount(progress.done, progress.total, progress.unit), pace, describe_figures(progress.figures)]
    return f"{title(progress)}: " + "  ".join(part for part in parts if part)
