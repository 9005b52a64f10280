"""Progress of a phase, as one small message to whoever listens: terminal, log, run folder, dashboard.

A phase calls `report(Progress(...))`; listeners decide how often to show it. No phase knows who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A state of one piece of work: `done` of `total` `unit`s of `name` (dataset, shard, "" for all) in `stage`."""

    stage: str
    name: str = ""
    done: int
    total: int
    unit: str
    figures: dict[str, float | int | str] = field(default_factory=dict)
    is_final: bool = False


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """A listener that ignores everything."""
