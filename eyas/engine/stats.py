"""Counters of the engine, as plain numbers: what `/metrics`, `/v1/loads` and `/server_info` show.

Written by the engine's thread, read by the server's; a reader may see one counter a step ahead of another.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection

from eyas.engine.request import Request

_WINDOW_S = 10.0
LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """Counts below each bound, for Prometheus."""

    def __init__(self) -> None:
        self.counts = [0] * len(LATENCY_BUCKETS_S)
        self.count, self.total = 0, 0.0

    def add(self, value: float) -> None:
        """Count one observation in seconds."""
        self.count += 1
        self.total += value
        for index, bound in enumerate(LATENCY_BUCKETS_S):
            if value <= bound:
                self.counts[index] += 1


class EngineStats:
    """What has happened so far and what is happening now."""

    def __init__(self, *, capacity_tokens: int, max_running: int) -> None:
        self.capacity_tokens, self.max_running = capacity_tokens, max_running
        self.counters: Counter[str] = Counter()
        self.num_running = self.num_waiting = self.num_used_tokens = 0
        self.first_token, self.end_to_end, self.queueing = Histogram(), Histogram(), Histogram()
        self._recent: deque[tuple[float, int]] = deque()

    def set_load(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Note what runs and waits."""
        self.num_running, self.num_waiting = len(running), len(waiting)
        self.num_used_tokens = sum(request.num_tokens for request in running)

    def count_step(self, num_new: int, num_prompt: int, seconds: float) -> None:
        """Note one step: tokens it generated (for the rate), computed prompt tokens, wall time."""
        self.counters["computed_prompt_tokens"] += num_prompt
        self.counters["steps"] += 1
        self.counters["step_us"] += int(seconds * 1e6)
        now = time.monotonic()
        self._recent.append((now, num_new))
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()

    def count_first_token(self, request: Request) -> None:
        """Note that a prompt is computed."""
        self.counters["prompt_tokens"] += len(request.prompt_ids)
        self.counters["cached_tokens"] += request.num_cached
        self.first_token.add(request.prefilled_at - request.received_at)
        self.queueing.add(request.started_at - request.received_at)

    def count_finished(self, request: Request) -> None:
        """Note the end of a request."""
        if request.finish_reason and request.finish_reason["type"] == "abort":
            self.counters["aborted"] += 1
            return
        self.counters["requests"] += 1
        self.end_to_end.add(request.finished_at - request.received_at)
        if request.spec is not None:
            self.counters["spec_verifications"] += request.spec.verifications
            self.counters["spec_accepted"] += request.spec.accepted
            self.counters["spec_proposed"] += request.spec.proposed

    @property
    def gen_throughput(self) -> float:
        """Generated tokens per second over the last ten seconds; 0 when nothing runs."""
        recent = list(self._recent)
        if not self.num_running or len(recent) < 2:
            return 0.0
        return sum(count for _, count in recent[1:]) / max(time.monotonic() - recent[0][0], 1e-6)

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that were copied from an earlier prompt's pages."""
        return self.counters["cached_tokens"] / max(1, self.counters["prompt_tokens"])

    @property
    def token_usage(self) -> float:
        """Share of the cache in use."""
        return self.num_used_tokens / self.capacity_tokens

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification, bonus included: 1 + accepted / verifications; 0 without speculation."""
        verifications = self.counters["spec_verifications"]
        return 1 + self.counters["spec_accepted"] / verifications if verifications else 0.0
