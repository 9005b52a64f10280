"""A draft measured against its target alone: what is sent, and what comes of it.

1. The target's own replies (draft off, many in flight): the reference, and where each falls into a loop.
2. The same prompts with the draft, cut where the loop would begin: raw counts, and identical / tie / wrong.
3. Timed blocks in A-B-B-A order at each number of requests in flight, same prompts, same cut, so that both
   sides make the same tokens; before each the same prompts untimed, a few tokens of each, so that no block
   meets a cold server and all find their prompts in the prefix cache. 4. Where asked for, replies at temperature 1 from both sides.

Every draft reply is judged, those of the timed blocks too, each against the reply without draft that was
made at the same load. Judging comes last, when every block is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.speculate.accept import AcceptCounts, pool
from eyas.speculate.baselines import BigramTable, bigram_counts, prompt_lookup_counts
from eyas.speculate.blocks import SIDES, BlockStore, Kind, Point, Visit, visits_of
from eyas.speculate.config import BenchmarkConfig, DraftShape
from eyas.speculate.load import Block, Server, run_block
from eyas.speculate.loops import loop_free_tokens
from eyas.speculate.lossless import Measure, Verdict, judge
from eyas.speculate.results import GridPoint, Row, Sampled, SetMeasurement, TimedBlock
from eyas.speculate.servers import Servers
from eyas.speculate.sets import BenchmarkPrompt

Predict = Callable[[Sequence[tuple[list[int], list[int]]]], Sequence[AcceptCounts | None]]
"""(prompt ids, reply ids) of some greedy replies → counts of the replay of each; None where none can be made here."""

Sets = dict[str, list[BenchmarkPrompt]]
Blocks = dict[tuple[Visit, Point], Block]

WORDS: dict[Kind, str] = {"count": "replies compared", "sample": "replies drawn at temperature 1", "time": "timed"}
SAMPLED_TOKENS = 8
WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One set as it is asked: caps cut each reply where its loop begins."""

    prompts: list[BenchmarkPrompt]
    free: list[int]
    """Tokens of each reference before its loop, 2 at least."""
    caps: list[int]

    @classmethod
    def of(cls, prompts: list[BenchmarkPrompt], reference: Block, max_new_tokens: int) -> Asked:
        free = [max(2, loop_free_tokens(reply.output_ids)) for reply in reference.replies]
        caps = [
            tokens if tokens < len(reply.output_ids) else max_new_tokens
            for tokens, reply in zip(free, reference.replies, strict=True)
        ]
        return cls(prompts=prompts, free=free, caps=caps)

    def timed(self, count: int) -> tuple[list[BenchmarkPrompt], list[int]]:
        """`count` prompts and their caps; a set too small to fill the load is gone through again."""
        places = [place % len(self.prompts) for place in range(count)]
        return [self.prompts[place] for place in places], [self.caps[place] for place in places]


def collect(
    sets: Sets, servers: Servers, config: BenchmarkConfig, store: BlockStore, step: Callable[[str, str], None]
) -> tuple[Blocks, dict[str, Asked]]:
    """Every block of the benchmark, those that are kept not made again; `step(set, word)` after each."""
    blocks: Blocks = {}
    asked: dict[str, Asked] = {}
    sizes = {name: len(prompts) for name, prompts in sets.items()}
    for visit in visits_of(config, sizes, is_side_by_side=servers.is_side_by_side):
        keys = [visit.key(point) for point in visit.points]
        server = None if store.has(keys) else servers.get(visit.side, visit.shape, fresh=True)
        for point, key in zip(visit.points, keys, strict=True):

            def make(point: Point = point) -> Block:
                return _send(server or servers.get(visit.side, visit.shape), point, sets[point.set], asked, config)  # noqa: B023

            block = store.get(key, make)
            blocks[visit, point] = block
            if point.kind == "count" and visit.side == "off":
                asked[point.set] = Asked.of(sets[point.set], block, config.max_new_tokens)
            with_draft = f"with the draft ({visit.shape})" if visit.side == "on" else "without draft"
            step(point.set, f"{with_draft}, {WORDS[point.kind]}, {point.concurrency} in flight")
    return blocks, asked


def num_blocks(config: BenchmarkConfig, sizes: dict[str, int]) -> dict[str, int]:
    """How often `collect` calls `step` for each set."""
    points = [point.set for visit in visits_of(config, sizes, is_side_by_side=True) for point in visit.points]
    return {name: points.count(name) for name in sizes}


def _send(server: Server, point: Point, prompts: list[BenchmarkPrompt], asked: dict[str, Asked], config: BenchmarkConfig) -> Block:
    if point.kind == "sample":
        chosen = [prompt for prompt in prompts[: config.sampled_prompts] for _ in range(config.sampled_replies)]
        return run_block(server, chosen, [SAMPLED_TOKENS] * len(chosen), point.concurrency, temperature=1.0)
    if point.kind == "time":
        timed, caps = asked[point.set].timed(max(config.timed_prompts, 2 * point.concurrency))
        # Untimed: a server just started is slower, and its prefix cache empty; every timed block begins in one state.
        run_block(server, timed, [min(cap, WARM_UP_TOKENS) for cap in caps], point.concurrency)
        return run_block(server, timed, caps, point.concurrency)
    caps = asked[point.set].caps if server.has_draft else [config.max_new_tokens] * len(prompts)
    return run_block(server, prompts, caps, point.concurrency)


def compare(
    blocks: Blocks,
    asked: dict[str, Asked],
    config: BenchmarkConfig,
    *,
    measure_tie: Measure,
    bigrams: BigramTable | None,
    predict: Predict,
) -> list[SetMeasurement]:
    """Rows, timed blocks and points of the grid of every set, from its blocks; needs no server but for ties.

    `bigrams` is None where there is no training data to count them in.
    """
    measurements = []
    for name, work in asked.items():
        mine = {key: block for key, block in blocks.items() if key[1].set == name}
        (reference,) = [block for (visit, point), block in mine.items() if point.kind == "count" and visit.side == "off"][:1]
        expected = [reply.output_ids[:tokens] for reply, tokens in zip(reference.replies, work.free, strict=True)]
        counted = {visit.shape: block for (visit, point), block in mine.items() if point.kind == "count" and visit.side == "on"}
        pairs = [(prompt.input_ids, reply) for prompt, reply in zip(work.prompts, expected, strict=True)]
        headline = counted[config.shape]
        rows = [
            _row(prompt, wanted.output_ids, tokens, seen, config.num_draft_tokens, measure_tie, bigrams, replayed)
            for prompt, wanted, tokens, seen, replayed in zip(
                work.prompts, reference.replies, work.free, headline.replies, predict(pairs), strict=True
            )
        ]
        measurements.append(
            SetMeasurement(
                name=name,
                rows=rows,
                blocks=_timed_blocks(mine, work, config.shape, measure_tie),
                grid=[
                    _grid_point(shape, counted[shape], expected, work, mine, measure_tie)
                    for shape in counted
                    if shape != config.shape
                ],
                sampled=_sampled(mine, config),
            )
        )
    return measurements


def _row(
    prompt: BenchmarkPrompt,
    reference_ids: list[int],
    num_free: int,
    seen: Any,
    num_draft_tokens: int,
    measure_tie: Measure,
    bigrams: BigramTable | None,
    predicted: AcceptCounts | None,
) -> Row:
    expected = reference_ids[:num_free]
    verdict = judge(measure_tie, prompt.input_ids, expected, seen.output_ids)
    counts = seen.counts or AcceptCounts()
    drafters = {"prompt_lookup": prompt_lookup_counts(prompt.input_ids, expected, num_draft_tokens)}
    if bigrams is not None:
        drafters = {"bigram": bigram_counts(bigrams, expected, num_draft_tokens)} | drafters
    return Row(
        id=prompt.id,
        dataset=prompt.dataset,
        prompt_ids=prompt.input_ids,
        reference_ids=reference_ids,
        loop_free_tokens=min(num_free, len(reference_ids)),
        draft_ids=seen.output_ids,
        outcome=verdict.outcome,
        difference=_difference(verdict),
        verifications=counts.verifications,
        accepted=counts.accepted,
        histogram=list(counts.histogram),
        baselines={name: (item.verifications, item.accepted) for name, item in drafters.items()},
        predicted=(predicted.verifications, predicted.accepted) if predicted else None,
    )


def _difference(verdict: Verdict) -> dict[str, float | int | None]:
    """What JSON can hold of a verdict: an infinite gap is left out."""
    numbers = {"position": verdict.position, "gap": verdict.gap, "epsilon": verdict.epsilon}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _timed_blocks(mine: Blocks, work: Asked, shape: DraftShape, measure_tie: Measure) -> list[TimedBlock]:
    """The timed blocks of one shape, by point, round and place; each draft reply against the first block without draft."""
    timed = {
        (point.concurrency, visit.round, visit.place): block
        for (visit, point), block in mine.items()
        if point.kind == "time" and visit.shape == shape
    }
    blocks: list[TimedBlock] = []
    for (concurrency, number, place), block in sorted(timed.items()):
        own = timed[concurrency, number, 0].replies
        prompts, _ = work.timed(len(block.replies))
        verdicts = [
            judge(measure_tie, prompt.input_ids, wanted.output_ids, reply.output_ids)
            for prompt, wanted, reply in zip(prompts, own, block.replies, strict=True)
            if SIDES[place] == "on"
        ]
        counts = pool(reply.counts for reply in block.replies if reply.counts is not None)
        blocks.append(
            TimedBlock(
                side=SIDES[place],
                concurrency=concurrency,
                round=number,
                wall_s=block.wall_s,
                output_tokens=block.num_tokens,
                datasets=[prompt.dataset for prompt in prompts],
                reply_tokens=[len(reply.output_ids) for reply in block.replies],
                latencies_s=[reply.latency_s for reply in block.replies],
                first_tokens_s=[reply.first_token_s for reply in block.replies if reply.first_token_s is not None],
                outcomes=[verdict.outcome for verdict in verdicts],
                verifications=counts.verifications,
                accepted=counts.accepted,
            )
        )
    return blocks


def _grid_point(
    shape: DraftShape, counted: Block, expected: list[list[int]], work: Asked, mine: Blocks, measure_tie: Measure
) -> GridPoint:
    total = pool(reply.counts for reply in counted.replies if reply.counts is not None)
    verdicts = [
        judge(measure_tie, prompt.input_ids, wanted, reply.output_ids)
        for prompt, wanted, reply in zip(work.prompts, expected, counted.replies, strict=True)
    ]
    return GridPoint(
        shape=shape,
        verifications=total.verifications,
        accepted=total.accepted,
        histogram=list(total.histogram),
        outcomes=[verdict.outcome for verdict in verdicts],
        blocks=_timed_blocks(mine, work, shape, measure_tie),
    )


def _sampled(mine: Blocks, config: BenchmarkConfig) -> list[Sampled]:
    sides = {visit.side: block for (visit, point), block in mine.items() if point.kind == "sample"}
    if not sides:
        return []
    replies = {side: [reply.output_ids for reply in block.replies] for side, block in sides.items()}
    each = config.sampled_replies
    starts = range(0, len(replies["off"]), each)
    return [Sampled(off=replies["off"][start : start + each], on=replies["on"][start : start + each]) for start in starts]
