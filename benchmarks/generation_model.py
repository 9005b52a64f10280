"""A model of the reference run for benchmarks/scheduler.py and benchmarks/forecast.py: no server, no clock.

Eight datasets, 88,088 prompts. A server decodes R(n) = 1350 · (1 − exp(−n / 16)) tokens/s over the n requests that
run (at most 96), shared equally, and fewer at a longer context where a cost of context is given; all requests advance
together, so a request is one entry in a heap ordered by the point of shared progress at which it ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from eyas.generation.scheduler import Share, choose

PEAK, SCALE, LIMIT = 1350.0, 16.0, 96
# name, prompts, median, log-sd, cap, mean prompt. B1's replies are measured (median 646, mean 1,416, sd 1,640 over 488);
# the rest is plausible.
REFERENCE = [
    ("B1_glaive", 15_000, 646, 1.15, 10_240, 600),
    ("B2_toolace", 9_000, 420, 0.95, 10_240, 700),
    ("B3_opencode", 14_000, 1_500, 1.00, 10_240, 350),
    ("B4_math", 12_000, 2_400, 0.90, 10_240, 200),
    ("B5_sharegpt", 16_000, 700, 1.05, 10_240, 900),
    ("B6_writing", 8_000, 900, 0.70, 10_240, 250),
    ("B7_general", 10_000, 350, 1.10, 10_240, 150),
    ("B8_sweagent", 4_088, 1_900, 1.20, 16_384, 8_000),
]


@dataclass(kw_only=True, eq=False)
class Work:
    """One dataset of the model: its lengths in order of sending, and what has become of them."""

    share: Share
    cap: int
    prompt_tokens: int
    lengths: list[int]
    next_index: int = 0
    flying: dict[int, float] = field(default_factory=dict)  # start number → progress at its start


@dataclass(kw_only=True)
class Clock:
    """Shared state of a simulation, given to the observer: seconds, tokens per request so far, tokens in all, mean context."""

    seconds: float = 0.0
    progress: float = 0.0
    tokens: float = 0.0
    num_done: int = 0
    context: float = 0.0


def reference_work(rng: np.random.Generator, *, scale: float = 1.0, drift: float = 0.0) -> list[Work]:
    """Draw a run; `scale` multiplies the numbers of prompts, `drift` the lengths of each dataset's second half."""
    works = []
    for name, count, median, sigma, cap, prompt in REFERENCE:
        number = max(1, int(count * scale))
        raw = np.exp(np.log(median) + sigma * rng.standard_normal(number))
        if drift:
            raw[number // 2 :] *= 1 + drift
        lengths = np.clip(raw.round(), 2, cap).astype(int).tolist()
        share = Share(name=name, num_pending=number, mean_tokens=float(cap))
        works.append(Work(share=share, cap=cap, prompt_tokens=prompt, lengths=lengths))
    return works


def rate(running: int, speed: float = 1.0) -> float:
    return speed * PEAK * (1 - math.exp(-running / SCALE))


Pick = Callable[[list[Work], int], Work | None]


def by_scheduler(works: list[Work], running: int) -> Work | None:
    """Eyas' order."""
    share = choose([work.share for work in works], LIMIT, 0.02)
    return next((work for work in works if work.share is share), None)


def one_after_the_other(works: list[Work], running: int) -> Work | None:
    """Dataset after dataset, the next one's prompts filling up as soon as there is room."""
    return next((work for work in works if work.share.num_pending), None)


def with_barrier(works: list[Work], running: int) -> Work | None:
    """Dataset after dataset, each ended before the next begins."""
    busy = next((work for work in works if work.flying), None)
    if busy is not None:
        return busy if busy.share.num_pending else None
    return one_after_the_other(works, running)


def simulate(
    works: list[Work], pick: Pick, *, speed: Callable[[float], float] = lambda share: 1.0, context_cost: float = 0.0
) -> Iterator[tuple[Clock, Work, int]]:
    """Run to the end, yielding (clock, dataset, start number) at each reply.

    `speed` maps the share done to a factor; a token takes 1 + `context_cost` · (mean context) times as long.
    """
    clock = Clock()
    total = sum(len(work.lengths) for work in works)
    heap: list[tuple[float, int, int]] = []
    sums = [0.0] * len(works)
    counts = [0] * len(works)
    origins = 0.0  # Σ (prompt − progress at the start) of those that run: their contexts less today's progress
    while True:
        while len(heap) < LIMIT and (work := pick(works, len(heap))) is not None:
            number = work.next_index
            work.next_index += 1
            work.share.start()
            work.flying[number] = clock.progress
            origins += work.prompt_tokens - clock.progress
            heapq.heappush(heap, (clock.progress + work.lengths[number], works.index(work), number))
        if not heap:
            return
        clock.context = origins / len(heap) + clock.progress
        factor = speed(clock.num_done / total) / (1 + context_cost * clock.context)
        end, which, number = heapq.heappop(heap)
        step = end - clock.progress
        running = len(heap) + 1
        clock.seconds += step * running / rate(running, factor)
        clock.tokens += step * running
        clock.progress = end
        clock.num_done += 1
        work = works[which]
        origins -= work.prompt_tokens - work.flying.pop(number)
        work.share.in_flight -= 1
        sums[which] += work.lengths[number]
        counts[which] += 1
        work.share.learn(counts[which], sums[which] / counts[which])
        yield clock, work, number
