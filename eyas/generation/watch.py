"""What goes wrong while a run goes on, as events: each begins once, may end once, and says what to do.

Rules look at snapshots alone, so that they can be tested without a server. Events are appended to
`progress/events.jsonl`; dashboards and notifications are built from them elsewhere.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from eyas.files import json_line
from eyas.manifest import now

log = logging.getLogger(__name__)

EVENTS_NAME = "events.jsonl"
STALL_LEAST_S = 300.0
SLOW_SHARE = 0.5
FALLING_SHARE = 0.75
NUM_LOOKS = 8  # consecutive looks before a slow run is called slow
SERVER_LOOKS = 24  # looks whose mean is a server's throughput; one look alone is mostly chance
BYTES_PER_JOURNAL_BYTE = 3.5  # the journal's line, and its row in tokenized_data.jsonl with ids and mask

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something began (`is_over` False) or ended. `kind` is stable; `name` is the dataset or server it is about."""

    kind: str
    level: Level
    name: str
    message: str
    is_over: bool = False
    at: str = field(default_factory=now)


@dataclass(frozen=True, kw_only=True)
class ServerLook:
    """One server at one moment; `kv_tokens` is the capacity of its KV cache in tokens, 0 if it does not say."""

    url: str
    state: str
    running: int
    tokens_per_s: float
    token_usage: float
    kv_tokens: int
    num_retractions: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment. `since_progress_s` counts from the last outcome or the last token of any server."""

    seconds: float
    in_flight: int
    capacity: int
    tokens_per_s: float
    since_progress_s: float
    longest_reply_s: float
    free_bytes: int
    bytes_needed: float
    servers: list[ServerLook] = field(default_factory=list)
    breached_gates: dict[str, list[str]] = field(default_factory=dict)
    pauses: dict[str, str] = field(default_factory=dict)


class Watch:
    """Turns snapshots into events; remembers what is going on."""

    def __init__(self) -> None:
        self.active: dict[tuple[str, str], Event] = {}
        self._rates: deque[float] = deque(maxlen=2000)
        self._slow_looks = 0
        self._looks: dict[str, deque[tuple[tuple[int, int], float]]] = {}
        self._earlier: dict[tuple[str, tuple[int, int]], tuple[float, int]] = {}
        self._falling: dict[str, Event] = {}
        self._retractions: dict[str, int] = {}

    def look(self, snapshot: Snapshot) -> list[Event]:
        """Events that begin or end with this snapshot."""
        found = {(event.kind, event.name): event for event in self._findings(snapshot)}
        begun = [event for key, event in found.items() if key not in self.active]
        ended = [
            Event(kind=event.kind, level="info", name=event.name, message=f"over: {event.message}", is_over=True)
            for key, event in self.active.items()
            if key not in found
        ]
        self.active = {key: self.active.get(key, event) for key, event in found.items()}
        return begun + ended

    def _findings(self, snapshot: Snapshot) -> Iterator[Event]:
        for cause, detail in snapshot.pauses.items():
            yield Event(kind="paused", level="warning", name=cause, message=detail)
        yield from self._progress(snapshot)
        for dataset, names in snapshot.breached_gates.items():
            yield Event(kind="gate", level="warning", name=dataset, message=f"share above the warn level: {', '.join(names)}")
        if snapshot.bytes_needed > snapshot.free_bytes:
            message = (
                f"{snapshot.free_bytes / 1e9:.1f} GB free, about {snapshot.bytes_needed / 1e9:.1f} GB still needed; "
                "free space or move the run before it pauses"
            )
            yield Event(kind="disk", level="error", name="run", message=message)
        for server in snapshot.servers:
            yield from self._server(server)

    def _progress(self, snapshot: Snapshot) -> Iterator[Event]:
        if snapshot.pauses or not snapshot.in_flight:
            return
        limit_s = max(STALL_LEAST_S, 2 * snapshot.longest_reply_s)
        if snapshot.since_progress_s > limit_s:
            message = f"no reply and no token for {snapshot.since_progress_s:.0f} s; look at the servers' logs"
            yield Event(kind="stalled", level="error", name="run", message=message)
            return
        if snapshot.in_flight < snapshot.capacity / 2 or snapshot.tokens_per_s <= 0:
            return
        usual = statistics.median(self._rates) if len(self._rates) >= 20 else 0.0
        is_slow = snapshot.tokens_per_s < SLOW_SHARE * usual
        self._slow_looks = self._slow_looks + 1 if is_slow else 0
        if not is_slow:
            self._rates.append(snapshot.tokens_per_s)
        if self._slow_looks >= NUM_LOOKS:
            message = f"{snapshot.tokens_per_s:.0f} tokens/s, usually {usual:.0f} with {snapshot.in_flight} requests in flight"
            yield Event(kind="slow", level="warning", name="run", message=message)

    def _server(self, server: ServerLook) -> Iterator[Event]:
        if server.state == "open":
            yield Event(kind="server_down", level="error", name=server.url, message="does not answer; it is probed again and again")
            return
        if server.num_retractions > self._retractions.get(server.url, server.num_retractions):
            message = (
                f"retracts requests (KV cache {server.token_usage:.0%} full): lower --max-running-requests, or raise "
                "--mem-fraction-static or --schedule-conservativeness"
            )
            yield Event(kind="retracting", level="warning", name=server.url, message=message)
        self._retractions[server.url] = server.num_retractions
        self._compare(server)
        if server.url in self._falling:
            yield self._falling[server.url]

    def _compare(self, server: ServerLook) -> None:
        """Set a server's mean throughput against all earlier looks at equal load.

        Equal means as many running, to a half, and a KV cache as full, to a tenth: longer contexts are slower by nature.
        """
        if server.running < 1 or server.tokens_per_s <= 0:
            return
        load = (round(2 * math.log2(server.running)), round(10 * server.token_usage))
        looks = self._looks.setdefault(server.url, deque())
        looks.append((load, server.tokens_per_s))
        if len(looks) > SERVER_LOOKS:
            left, rate = looks.popleft()
            mean, count = self._earlier.get((server.url, left), (0.0, 0))
            if server.url not in self._falling:
                self._earlier[server.url, left] = (mean + (rate - mean) / (count + 1), count + 1)
        earlier, count = self._earlier.get((server.url, load), (0.0, 0))
        if count < SERVER_LOOKS or any(other != load for other, _ in looks):
            return  # nothing to compare with: what was said of it stands
        now = statistics.fmean(rate for _, rate in looks)
        if now >= FALLING_SHARE * earlier:
            self._falling.pop(server.url, None)
        elif server.url not in self._falling:
            message = (
                f"{now:.0f} tokens/s with {server.running} running and {server.token_usage:.0%} of the KV cache's "
                f"{server.kv_tokens} tokens in use, {earlier:.0f} earlier at that load: fragmented memory, or other work on its "
                "processors; look at the machine, drain and restart the server"
            )
            self._falling[server.url] = Event(kind="falling", level="warning", name=server.url, message=message)


def append_events(progress_folder: Path, events: list[Event]) -> None:
    """Append events to `progress/events.jsonl` and the log; a disk that refuses is logged, never raised."""
    for event in events:
        is_known = event.is_over or event.kind == "gate"  # a gate warns by itself, with its share
        level = logging.INFO if is_known else logging.WARNING
        log.log(level, "event kind=%s name=%s %s", event.kind, event.name, event.message)
    if not events:
        return
    try:
        progress_folder.mkdir(parents=True, exist_ok=True)
        with open(progress_folder / EVENTS_NAME, "ab") as file:
            file.write(b"".join(json_line(asdict(event)) for event in events))
    except OSError as error:
        log.warning("events not recorded folder=%s error=%s", progress_folder, error)
