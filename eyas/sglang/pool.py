"""The pool of servers: how many requests each may hold, which are trusted now, and where a prompt goes.

A server's limit starts at its own `max_running_requests` and follows what it reports: waiting requests and
retractions lower it, a full and queue-free server raises it. Three failures in a row open its breaker; it
closes again after a real one-token `/generate`. A server that shows itself to be another one than was proven is
out at once, and no success but a new proof brings it back. Prompts that begin alike go to the same server while it has
room, so that its radix cache serves them (`cached_tokens` tells how often).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyas.sglang.client import SGLangClient

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 32
FAILURES_TO_OPEN = 3
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
PREFIX_IDS = 128
USUAL_OUTAGE_S = 300.0


@dataclass(kw_only=True, eq=False)
class Server:
    """One server of the pool: its limit of requests in flight, its breaker and what it last said of itself."""

    client: SGLangClient
    limit: int = DEFAULT_LIMIT
    ceiling: int = DEFAULT_LIMIT
    in_flight: int = 0
    state: Literal["joining", "ready", "open", "draining"] = "joining"
    num_failures: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    probe_at: float = 0.0
    busy_until: float = 0.0
    load: dict[str, float] = field(default_factory=dict)
    num_done: int = 0
    num_retractions: int = 0
    weight_version: str = ""
    model_path: str = ""
    """Of `/model_info`, like `weight_version`, when it was proven to be the target; empty if it did not say."""
    is_proven: bool = True
    reason: str = ""
    """Why it is out, as last seen."""
    out_since: float = 0.0

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def room(self) -> int:
        """Requests that may still be sent to it now."""
        if self.state != "ready" or time.monotonic() < self.busy_until:
            return 0
        return max(0, self.limit - self.in_flight)

    def set_ceiling(self, ceiling: int) -> None:
        """Take a limit learnt from the server, in requests."""
        self.ceiling = max(1, ceiling)
        self.limit = self.ceiling

    def adapt(self, load: dict[str, float], num_retracted: int) -> None:
        """Follow one reading of `/v1/loads`; `num_retracted` counts retractions since the last reading."""
        self.load = load
        self.num_retractions += num_retracted
        waiting = int(load.get("waiting", 0))
        slack = max(2, self.limit // 32)  # a short queue keeps the server full between two of our polls
        if num_retracted > 0:
            self.limit = max(1, self.limit * 4 // 5)
        elif waiting > slack:
            self.limit = max(1, self.limit - (waiting - slack))
        elif waiting == 0 and self.in_flight >= self.limit and self.limit < self.ceiling:
            self.limit = min(self.ceiling, self.limit + max(1, self.limit // 20))

    def difference(self, weight_version: str, model_path: str = "") -> str:
        """What the server now says of itself beside what it said when it was proven, in words; empty if nothing differs."""
        pairs = (("weight_version", self.weight_version, weight_version), ("model_path", self.model_path, model_path))
        return ", ".join(
            f"{name} {seen!r}, proven as {proven!r}" for name, proven, seen in pairs if proven and seen and proven != seen
        )

    def doubt(self, reason: str) -> None:
        """Trust the server no longer until it is proven anew, which is tried at the next look."""
        self.is_proven = False
        self.open_breaker(reason)
        self.probe_at = 0.0

    def open_breaker(self, reason: str) -> None:
        """Trust the server no longer until a probe succeeds; each opening doubles the wait, jittered."""
        if self.state == "draining":
            return
        self.reason = reason
        self.probe_at = time.monotonic() + self.backoff_s * random.uniform(0.5, 1.0)
        self.backoff_s = min(LAST_BACKOFF_S, self.backoff_s * 2)
        if self.state != "open":
            log.warning("server out url=%s reason=%s", self.url, reason)
            self.out_since = time.monotonic()
        self.state = "open"

    def close_breaker(self) -> None:
        """Trust the server again."""
        self.num_failures = 0
        self.is_proven = True
        self.backoff_s = FIRST_BACKOFF_S
        if self.state in ("open", "joining"):
            log.info("server in url=%s limit=%d", self.url, self.limit)
            self.state = "ready"


class ServerPool:
    """Leases places on servers. All methods belong to one event loop."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = list(servers)
        self._changed = asyncio.Condition()
        self.outage_since: float | None = None if any(server.state == "ready" for server in servers) else time.monotonic()

    @property
    def num_in_flight(self) -> int:
        return sum(server.in_flight for server in self.servers)

    @property
    def capacity(self) -> int:
        """Requests that the trusted servers hold together."""
        return sum(server.limit for server in self.servers if server.state == "ready")

    @property
    def usual_capacity(self) -> int:
        """Requests that the pool will hold: the trusted servers, and those that went out less than five minutes ago.

        With no trusted server the run is paused until some return, and all that are out count.
        """
        since = time.monotonic() - USUAL_OUTAGE_S if self.capacity else 0.0
        return self.capacity + sum(server.limit for server in self.servers if server.state == "open" and server.out_since >= since)

    async def wait_for_room(self) -> None:
        """Return when some server has room."""
        async with self._changed:
            while not any(server.room for server in self.servers):
                await self._wait()

    async def lease(self, input_ids: Sequence[int]) -> Server:
        """Take a place for a prompt on the best server, waiting for room; give it back with `release`."""
        async with self._changed:
            while (server := self._choose(input_ids)) is None:
                await self._wait()
            server.in_flight += 1
            return server

    async def release(self, server: Server) -> None:
        server.in_flight -= 1
        await self.wake()

    async def wake(self) -> None:
        """Let everyone who waits for room look again; call it after a server's state or limit has changed."""
        ready = any(server.state == "ready" for server in self.servers)
        if ready:
            self.outage_since = None
        elif self.outage_since is None:
            self.outage_since = time.monotonic()
        async with self._changed:
            self._changed.notify_all()

    async def report_success(self, server: Server) -> None:
        server.num_done += 1
        server.num_failures = 0
        if server.state == "open" and server.is_proven:
            server.close_breaker()
            await self.wake()

    async def report_failure(self, server: Server, reason: str) -> None:
        server.num_failures += 1
        if server.num_failures >= FAILURES_TO_OPEN and server.state == "ready":
            server.open_breaker(reason)
            await self.wake()

    async def report_changed(self, server: Server, reason: str) -> None:
        """A reply shows that the server is another one than was proven."""
        if server.is_proven:
            server.doubt(reason)
            await self.wake()

    async def report_busy(self, server: Server, retry_after_s: float) -> None:
        """The server's queue is full: nothing more for `retry_after_s`, and a lower limit."""
        server.busy_until = max(server.busy_until, time.monotonic() + retry_after_s)
        server.limit = max(1, min(server.limit, server.in_flight) - 1)

    async def add(self, server: Server) -> None:
        self.servers.append(server)
        await self.wake()

    async def drain(self, url: str) -> None:
        """Send nothing more to `url`; what it holds may finish."""
        for server in self.servers:
            if server.url == url.rstrip("/"):
                server.state = "draining"
        await self.wake()

    async def undrain(self, url: str) -> None:
        """Take a drained server back; it is probed first."""
        for server in self.servers:
            if server.url == url.rstrip("/") and server.state == "draining":
                server.state, server.probe_at = "joining", 0.0

    def _choose(self, input_ids: Sequence[int]) -> Server | None:
        free = [server for server in self.servers if server.room]
        if len(free) <= 1:
            return free[0] if free else None
        trusted = [server for server in self.servers if server.state == "ready"]
        home = max(trusted, key=lambda server: _affinity(server.url, input_ids))
        if home.room:
            return home
        return max(free, key=lambda server: server.room / server.limit)

    async def _wait(self) -> None:
        # `busy_until` passes without a notification, so look again now and then.
        try:
            async with asyncio.timeout(0.2):
                await self._changed.wait()
        except TimeoutError:
            return


def _affinity(url: str, input_ids: Sequence[int]) -> bytes:
    """Rendezvous hashing: each prefix has its own order of servers, and a lost server moves only its own prefixes."""
    prefix = array("q", input_ids[:PREFIX_IDS]).tobytes()
    return hashlib.blake2b(prefix, digest_size=8, key=hashlib.blake2b(url.encode(), digest_size=16).digest()).digest()
