"""What a running session knows of itself: throughput, ages of requests in flight, forecast, events.

A request's age in tokens is not visible from outside (replies are not streamed: that would cost a JSON object
per token), so it is estimated: (now − sent − queue and prefill) ÷ time per token, both measured on recent
replies. Throughput comes from the servers' token counters where `/metrics` is on, otherwise from requests in
flight ÷ time per token.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import StorageError
from eyas.files import write_json
from eyas.generation.dataset import DatasetRun
from eyas.generation.forecast import DatasetOutlook, Forecast, RateCurve, forecast
from eyas.generation.watch import BYTES_PER_JOURNAL_BYTE, ServerLook, Snapshot, Watch, append_events
from eyas.manifest import now
from eyas.sglang.pool import Server, ServerPool
from eyas.sglang.replies import Reply

log = logging.getLogger(__name__)

SERVERS_NAME = "servers.json"
_WEIGHT = 0.05  # of a new reply in the running means


class Telemetry:
    """Measures one session; `look` is called every few seconds, `refresh_forecast` less often."""

    def __init__(self, pool: ServerPool, progress_folder: Path) -> None:
        self._pool = pool
        self._folder = progress_folder
        self._curve = RateCurve()
        self._watch = Watch()
        self._token_s = 0.0
        self._lead_s = 0.0
        self._longest_reply_s = 0.0
        self._last_progress = time.monotonic()
        self._last_counter = 0.0
        self._last_look = time.monotonic()
        self.tokens_per_s = 0.0
        self.forecast: Forecast | None = None

    def count_reply(self, reply: Reply, seconds: float) -> None:
        """Learn from an accepted reply that took `seconds` from sending to its end."""
        self._last_progress = time.monotonic()
        self._longest_reply_s = max(self._longest_reply_s, seconds)
        num_tokens = len(reply.output_ids)
        if num_tokens < 8:
            return
        lead_s = min(seconds, max(reply.first_token_s, reply.queue_time_s))
        token_s = (seconds - lead_s) / (num_tokens - 1)
        weight = _WEIGHT if self._token_s else 1.0
        self._token_s += weight * (token_s - self._token_s)
        self._lead_s += weight * (lead_s - self._lead_s)

    def look(self, datasets: Sequence[DatasetRun], pauses: dict[str, str]) -> None:
        """Measure throughput, write `progress/servers.json`, and record what has begun or ended."""
        moment = time.monotonic()
        elapsed_s, self._last_look = moment - self._last_look, moment
        running = sum(_running(server) for server in self._pool.servers)
        self.tokens_per_s = self._measure(elapsed_s, running, moment)
        if not pauses and self._token_s:  # before the first reply the servers are reading prompts
            self._curve.add(moment, running, self.tokens_per_s, self._context(datasets))
        servers = [_look_at(server) for server in self._pool.servers]
        snapshot = Snapshot(
            seconds=moment,
            in_flight=self._pool.num_in_flight,
            capacity=self._pool.capacity,
            tokens_per_s=self.tokens_per_s,
            since_progress_s=moment - self._last_progress,
            longest_reply_s=self._longest_reply_s,
            free_bytes=_free_bytes(self._folder),
            bytes_needed=sum(_bytes_needed(dataset) for dataset in datasets),
            servers=servers,
            breached_gates={dataset.name: names for dataset in datasets if (names := dataset.gates.breached())},
            pauses=dict(pauses),
        )
        append_events(self._folder, self._watch.look(snapshot))
        self._write_servers()

    async def refresh_forecast(self, datasets: Sequence[DatasetRun]) -> None:
        """Forecast anew, in a thread; while every server is out, from the moment when they are back."""
        outlooks = [self._outlook(dataset) for dataset in datasets]
        self.forecast = await asyncio.to_thread(forecast, outlooks, self._curve, max(1, self._pool.usual_capacity))

    def expected_s(self, num_tokens: int) -> float:
        """Seconds that a reply of `num_tokens` takes at present, queueing and prefill included; 0 before the first reply."""
        return self._lead_s + num_tokens * self._token_s

    def figures(self) -> dict[str, float | int | str]:
        """Flat figures of the whole session, for every dataset's progress message."""
        figures: dict[str, float | int | str] = {"run_tokens_per_s": round(self.tokens_per_s, 1)}
        figures |= self.forecast.figures() if self.forecast else {"remaining_s": "unknown"}  # never a straight line instead
        alarms = sorted({event.kind for event in self._watch.active.values()})
        if alarms:
            figures["alarms"] = ", ".join(alarms)
        return figures

    def _measure(self, elapsed_s: float, running: float, moment: float) -> float:
        counters = [server.load.get("generation_tokens", 0.0) for server in self._pool.servers if server.state == "ready"]
        counter = sum(counters)
        grown, self._last_counter = counter - self._last_counter, counter
        if grown > 0:
            self._last_progress = moment
        if counters and min(counters) > 0 and 0 < grown < counter and elapsed_s > 0:
            return grown / elapsed_s
        return running / self._token_s if self._token_s else 0.0

    def _context(self, datasets: Sequence[DatasetRun]) -> float:
        """Mean context of the requests in flight, prompt included, in tokens; 0 where there is none."""
        contexts = [age + dataset.lengths.mean_prompt for dataset in datasets for age, _ in self._ages(dataset)]
        return sum(contexts) / len(contexts) if contexts else 0.0

    def _ages(self, dataset: DatasetRun) -> list[tuple[float, int]]:
        """(tokens so far, start number) of the requests in flight."""
        moment, pace = time.monotonic(), 1 / self._token_s if self._token_s else 0.0
        return [(max(0.0, (moment - start - self._lead_s) * pace), number) for start, number in dataset.flying.values()]

    def _outlook(self, dataset: DatasetRun) -> DatasetOutlook:
        ages = self._ages(dataset)
        num_between_tries = max(0, dataset.share.in_flight - len(ages))  # they begin anew
        return DatasetOutlook(
            name=dataset.name,
            sample=dataset.sample.copy(),
            num_pending=dataset.share.num_pending + num_between_tries,
            ages=ages,
            prompt_tokens=dataset.lengths.mean_prompt,
        )

    def _write_servers(self) -> None:
        rows = [
            {
                "url": server.url,
                "state": server.state,
                "limit": server.limit,
                "in_flight": server.in_flight,
                "done": server.num_done,
                "weight_version": server.weight_version,
                **{key: round(value, 4) for key, value in server.load.items()},
            }
            for server in self._pool.servers
        ]
        try:
            write_json(self._folder / SERVERS_NAME, {"at": now(), "servers": rows})
        except (OSError, StorageError) as error:  # progress is not data; the journal is what pauses on a full disk
            log.warning("servers not recorded error=%s", error)


def _running(server: Server) -> float:
    if server.state != "ready":
        return 0.0
    return max(0.0, server.in_flight - server.load.get("waiting", 0.0))


def _look_at(server: Server) -> ServerLook:
    load = server.load
    return ServerLook(
        url=server.url,
        state=server.state,
        running=int(load.get("running", 0)),
        tokens_per_s=load.get("tokens_per_s", 0.0),
        token_usage=load.get("token_usage", 0.0),
        kv_tokens=int(load.get("max_tokens", 0)),
        num_retractions=server.num_retractions,
    )


def _bytes_needed(dataset: DatasetRun) -> float:
    """Bytes that the rest of a dataset will take: journal now, results at the end."""
    num_settled = len(dataset.table) - dataset.num_unsettled
    if not num_settled:
        return 0.0
    size = dataset.journal.size_bytes
    return size / num_settled * (dataset.num_unsettled * BYTES_PER_JOURNAL_BYTE + num_settled * (BYTES_PER_JOURNAL_BYTE - 1))


def _free_bytes(folder: Path) -> int:
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    return shutil.disk_usage(existing).free
