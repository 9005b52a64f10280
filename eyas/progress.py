"""Progress of a phase, as one small message to whoever listens: terminal, log, run folder, dashboard.

A phase calls `report(Progress(...))`; listeners decide how often to show it. No phase knows who listens.
`recorder` is the listener that every process of a run uses: what it writes is what `eyas status` reads.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)

HISTORY_NAME = "history.jsonl"


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


def recorder(folder: Path, *, every_s: float = 2.0) -> Report:
    """A listener that keeps each piece's last message in `folder/<stage>[-<name>].json` and a thinned history.

    Each file is the message plus `at` (UTC), `pid`, `host` and `started_at`. The history gains a line per piece
    every `every_s` seconds, later every 1/300 of the piece's age, so that a run of days stays a few
    megabytes. A disk that refuses is logged, never raised: progress is not data.
    """
    pieces: dict[tuple[str, str], _Piece] = {}
    lock = threading.Lock()

    def listen(progress: Progress) -> None:
        with lock:
            piece = pieces.setdefault((progress.stage, progress.name), _Piece())
            seconds = time.monotonic()
            if seconds - piece.written_s < every_s and not progress.is_final:
                return
            process = {"pid": os.getpid(), "host": socket.gethostname()}
            message = {**asdict(progress), **process, "at": _now(), "started_at": piece.started_at}
            adds_history = progress.is_final or seconds - piece.history_s >= (seconds - piece.started_s) / 300
            try:
                _write(folder, progress, message, adds_history)
            except OSError as error:
                logger.warning("progress not recorded folder=%s error=%s", folder, error)
            piece.written_s = seconds
            if adds_history:
                piece.history_s = seconds

    return listen


class _Piece:
    def __init__(self) -> None:
        self.started_at = _now()
        self.started_s = time.monotonic()
        self.written_s = -float("inf")
        self.history_s = -float("inf")


def _write(folder: Path, progress: Progress, message: dict[str, object], adds_history: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{progress.stage}-{progress.name}" if progress.name else progress.stage
    line = json.dumps(message, ensure_ascii=False)
    temporary = folder / f".{name}.{os.getpid()}.tmp"  # renamed, not fsynced: it may be lost, never torn
    temporary.write_text(line + "\n", encoding="utf-8")
    os.replace(temporary, folder / f"{name}.json")
    if adds_history:
        with open(folder / HISTORY_NAME, "ab") as file:
            file.write(line.encode() + b"\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
