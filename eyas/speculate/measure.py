"""One set of prompts, measured with the draft off and on.

1. The target's own replies (draft off, many in flight): the reference, and where each falls into a loop.
2. The same prompts with the draft, cut where the loop would begin: raw counts, and identical / tie / wrong.
3. Timed blocks in A-B-B-A order (off, on, on, off) at each number of requests in flight, same prompts,
   same cut, so that both sides make the same tokens and a drifting machine favours neither.

Every draft reply is judged, those of the timed blocks too, each against the reply without draft that was
made at the same load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from eyas.speculate.accept import AcceptCounts
from eyas.speculate.baselines import BigramTable, bigram_counts, prompt_lookup_counts
from eyas.speculate.config import BenchmarkConfig
from eyas.speculate.load import Block, Server, run_block
from eyas.speculate.loops import loop_free_tokens
from eyas.speculate.lossless import Measure, Verdict, judge
from eyas.speculate.results import Row, SetMeasurement, Side, TimedBlock
from eyas.speculate.sets import BenchmarkPrompt

Predict = Callable[[Sequence[tuple[list[int], list[int]]]], Sequence[AcceptCounts | None]]
"""(prompt ids, reply ids) of some greedy replies → counts of the replay of each; None where none can be made here."""

_SIDES: tuple[Side, ...] = ("off", "on", "on", "off")


def measure_set(
    name: str,
    prompts: Sequence[BenchmarkPrompt],
    servers: dict[Side, Server],
    config: BenchmarkConfig,
    *,
    measure_tie: Measure,
    bigrams: BigramTable,
    predict: Predict,
    step: Callable[[str], None],
) -> SetMeasurement:
    """Measure one set; `step` is called with a word after each block."""
    in_flight = min(config.counting_concurrency, len(prompts))
    reference = run_block(servers["off"], prompts, [config.max_new_tokens] * len(prompts), in_flight)
    step("reference")
    free = [max(2, loop_free_tokens(reply.output_ids)) for reply in reference.replies]
    caps = [
        tokens if tokens < len(reply.output_ids) else config.max_new_tokens
        for tokens, reply in zip(free, reference.replies, strict=True)
    ]
    counted = run_block(servers["on"], prompts, caps, in_flight)
    step("counts")
    expected = [reply.output_ids[:tokens] for reply, tokens in zip(reference.replies, free, strict=True)]
    predicted = predict([(prompt.input_ids, reply) for prompt, reply in zip(prompts, expected, strict=True)])
    step("replayed")
    rows = [
        _row(prompt, wanted.output_ids, tokens, seen, config.num_draft_tokens, measure_tie, bigrams, replayed)
        for prompt, wanted, tokens, seen, replayed in zip(prompts, reference.replies, free, counted.replies, predicted, strict=True)
    ]
    step("compared")
    blocks: list[TimedBlock] = []
    for concurrency in config.concurrency:
        count = max(config.timed_prompts, 2 * concurrency)
        blocks += _timed_blocks(prompts[:count], caps[:count], servers, concurrency, config, measure_tie, step)
    return SetMeasurement(name=name, rows=rows, blocks=blocks)


def num_steps(config: BenchmarkConfig) -> int:
    """How often `measure_set` calls `step`."""
    return 4 + len(_SIDES) * config.repeats * len(config.concurrency)


def _row(
    prompt: BenchmarkPrompt,
    reference_ids: list[int],
    num_free: int,
    seen: Any,
    num_draft_tokens: int,
    measure_tie: Measure,
    bigrams: BigramTable,
    predicted: AcceptCounts | None,
) -> Row:
    expected = reference_ids[:num_free]
    verdict = judge(measure_tie, prompt.input_ids, expected, seen.output_ids)
    counts = seen.counts or AcceptCounts()
    drafters = {
        "bigram": bigram_counts(bigrams, expected, num_draft_tokens),
        "prompt_lookup": prompt_lookup_counts(prompt.input_ids, expected, num_draft_tokens),
    }
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


def _timed_blocks(
    prompts: Sequence[BenchmarkPrompt],
    caps: Sequence[int],
    servers: dict[Side, Server],
    concurrency: int,
    config: BenchmarkConfig,
    measure_tie: Measure,
    step: Callable[[str], None],
) -> list[TimedBlock]:
    blocks: list[TimedBlock] = []
    for number in range(config.repeats):
        made: list[tuple[Side, Block]] = []
        for side in _SIDES:
            made.append((side, run_block(servers[side], prompts, caps, concurrency)))
            step(f"{side} at {concurrency}")
        own = {reply.id: reply.output_ids for reply in made[0][1].replies}
        for side, block in made:
            verdicts = [
                judge(measure_tie, prompt.input_ids, own[reply.id], reply.output_ids)
                for prompt, reply in zip(prompts, block.replies, strict=True)
                if side == "on"
            ]
            blocks.append(
                TimedBlock(
                    side=side,
                    concurrency=concurrency,
                    round=number,
                    wall_s=block.wall_s,
                    output_tokens=block.num_tokens,
                    latencies_s=[reply.latency_s for reply in block.replies],
                    first_tokens_s=[reply.first_token_s for reply in block.replies if reply.first_token_s is not None],
                    outcomes=[verdict.outcome for verdict in verdicts],
                )
            )
    return blocks
