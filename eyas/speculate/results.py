"""What the benchmark measures, raw and per set, and the figures drawn from it.

Raw first: `raw-<set>.json` holds every reply's ids and counts and every timed block; `results.json` is a
function of those files alone, so each figure can be traced and none needs a server to be made again.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from eyas.speculate.accept import DEFINITION, AcceptCounts, interval, pool
from eyas.speculate.config import DraftShape
from eyas.speculate.sampling import same_distribution

Side = Literal["off", "on"]
Outcome = Literal["identical", "tie", "wrong"]


class Row(BaseModel):
    """One prompt of a set: the target's own reply, its loop-free part, and what the draft and the baselines made of that."""

    model_config = ConfigDict(extra="forbid")

    id: str
    dataset: str
    prompt_ids: list[int]
    reference_ids: list[int]
    loop_free_tokens: int
    draft_ids: list[int]
    outcome: Outcome
    difference: dict[str, float | int | None] = Field(default_factory=dict)
    verifications: int
    accepted: int
    histogram: list[int] = Field(default_factory=list)
    baselines: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Name of a drafter without a model → (verifications, accepted) on the same part of the reply."""
    predicted: tuple[int, int] | None = None
    """(verifications, accepted) of the replay."""

    @property
    def counts(self) -> AcceptCounts:
        return AcceptCounts(verifications=self.verifications, accepted=self.accepted, histogram=tuple(self.histogram))


class TimedBlock(BaseModel):
    """One timed block: one side, one number of requests in flight; times in seconds."""

    model_config = ConfigDict(extra="forbid")

    side: Side
    concurrency: int
    round: int
    wall_s: float
    output_tokens: int
    datasets: list[str]
    reply_tokens: list[int]
    """Dataset and new tokens of each reply, beside its latency."""
    latencies_s: list[float]
    first_tokens_s: list[float] = Field(default_factory=list)
    outcomes: list[Outcome] = Field(default_factory=list)
    """One per reply with the draft, against the reply without it at the same load."""
    verifications: int = 0
    accepted: int = 0


class GridPoint(BaseModel):
    """Another shape of the draft on the same set: counted and timed as the headline's."""

    model_config = ConfigDict(extra="forbid")

    shape: DraftShape
    verifications: int
    accepted: int
    histogram: list[int] = Field(default_factory=list)
    outcomes: list[Outcome]
    blocks: list[TimedBlock]


class Sampled(BaseModel):
    """Replies to one prompt at temperature 1, without and with the draft."""

    model_config = ConfigDict(extra="forbid")

    off: list[list[int]]
    on: list[list[int]]


class SetMeasurement(BaseModel):
    """Everything measured on one set."""

    model_config = ConfigDict(extra="forbid")

    name: str
    engine: dict[str, Any] = Field(default_factory=dict)
    identity: list[dict[str, Any]] = Field(default_factory=list)
    rows: list[Row]
    blocks: list[TimedBlock]
    grid: list[GridPoint] = Field(default_factory=list)
    sampled: list[Sampled] = Field(default_factory=list)


def summarise(measurements: list[SetMeasurement], *, engine: str, num_draft_tokens: int, min_verifications: int) -> dict[str, Any]:
    """The content of `results.json`; `overall` pools the held-out prompts, or all sets where there are none."""
    rows = [row for measurement in measurements for row in measurement.rows]
    heldout = [row for measurement in measurements if measurement.name == "heldout" for row in measurement.rows]
    headline = heldout or rows
    blocks = [block for measurement in measurements for block in measurement.blocks]
    timing = _timing(blocks)
    by_dataset = {name: [row for row in headline if row.dataset == name] for name in sorted({row.dataset for row in headline})}
    per_set = {measurement.name: _accept(measurement.rows) for measurement in measurements}
    overall = _accept(headline)
    grid = _grid(measurements, DraftShape(num_steps=num_draft_tokens), rows, timing)
    best = _best(grid)
    others = [point for measurement in measurements for point in measurement.grid]
    outcomes = [row.outcome for row in rows] + [outcome for block in blocks for outcome in block.outcomes]
    outcomes += [outcome for point in others for outcome in point.outcomes]
    outcomes += [outcome for point in others for block in point.blocks for outcome in block.outcomes]
    return {
        "schema_version": 1,
        "definition": DEFINITION + "; on the loop-free part of replies",
        "engine": engine,
        "engine_details": measurements[0].engine if measurements else {},
        "num_draft_tokens": num_draft_tokens,
        "accept_length": {
            "overall": overall["accept_length"],
            "overall_pools": "heldout" if heldout else "all sets",
            "per_dataset": {name: _accept(items)["accept_length"] for name, items in by_dataset.items()},
            "per_set": {name: item["accept_length"] for name, item in per_set.items()},
            "interval_80": overall["interval_80"],
            "interval_95": overall["interval_95"],
            "num_verifications": overall["num_verifications"],
            "num_accepted": overall["num_accepted"],
            "position_rates": overall["position_rates"],
            "wanted_verifications": min_verifications,
            "has_enough_verifications": overall["num_verifications"] >= min_verifications,
        },
        "all_sets": _accept(rows),
        "per_dataset": {name: _accept(items) | {"timing": _timing_of(name, blocks)} for name, items in by_dataset.items()},
        "per_set": per_set,
        "outputs": _outputs(outcomes),
        "predicted_accept_length": overall["predicted_accept_length"],
        "baselines": overall["baselines"],
        "beats_baselines": all(value < overall["accept_length"] for value in overall["baselines"].values()),
        "speedup": timing[0]["speedup"] if timing else None,
        "break_even_concurrency": _break_even(best),
        "timing": timing,
        "grid": grid,
        "best": best,
        "sampling": same_distribution([(item.off, item.on) for measurement in measurements for item in measurement.sampled]),
        "timing_per_set": {measurement.name: _timing(measurement.blocks) for measurement in measurements},
        "loops": {
            "replies": len(rows),
            "with_loop": sum(row.loop_free_tokens < len(row.reference_ids) for row in rows),
            "tokens": sum(len(row.reference_ids) for row in rows),
            "loop_free_tokens": sum(row.loop_free_tokens for row in rows),
        },
    }


def _grid(
    measurements: list[SetMeasurement], shape: DraftShape, rows: list[Row], timing: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Every shape of the draft over all sets, the headline's first."""
    outcomes = [row.outcome for row in rows]
    points = [_shape_point(shape, pool(row.counts for row in rows), outcomes, timing)]
    for other in dict.fromkeys(point.shape for measurement in measurements for point in measurement.grid):
        mine = [point for measurement in measurements for point in measurement.grid if point.shape == other]
        total = pool(
            AcceptCounts(verifications=point.verifications, accepted=point.accepted, histogram=tuple(point.histogram))
            for point in mine
        )
        outcomes = [outcome for point in mine for outcome in point.outcomes]
        points.append(_shape_point(other, total, outcomes, _timing([block for point in mine for block in point.blocks])))
    return points


def _shape_point(shape: DraftShape, counts: AcceptCounts, outcomes: list[Outcome], timing: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "shape": str(shape),
        "num_steps": shape.num_steps,
        "top_k": shape.top_k,
        "num_verified": shape.verified,
        "accept_length": counts.accept_length,
        "num_verifications": counts.verifications,
        "num_accepted": counts.accepted,
        "position_rates": counts.position_rates,
        "outputs": _outputs(outcomes),
        "timing": timing,
    }


def _break_even(best: list[dict[str, Any]]) -> int | None:
    """The smallest number in flight from which on, at every one measured, no shape of the draft gains beyond its spread."""
    lost = None
    for item in sorted(best, key=lambda item: int(item["concurrency"]), reverse=True):
        if item["shape"] is not None:
            break
        lost = int(item["concurrency"])
    return lost


def _best(grid: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per number of requests in flight the fastest shape whose slowest pair of blocks still gained, or none.

    What lies within the spread is no gain, so a shape that is faster only on average is not recommended.
    """
    best = []
    for concurrency in dict.fromkeys(point["concurrency"] for shape in grid for point in shape["timing"]):
        points = [(shape["shape"], point) for shape in grid for point in shape["timing"] if point["concurrency"] == concurrency]
        gains = [(point["speedup"], shape) for shape, point in points if point["speedup_min"] > 1]
        speedup, shape = max(gains, default=(1.0, None))
        best.append({"concurrency": concurrency, "shape": shape, "speedup": speedup})
    return best


def _accept(rows: list[Row]) -> dict[str, Any]:
    counts = [row.counts for row in rows]
    total = pool(counts)
    predicted = [_counts(row.predicted) for row in rows if row.predicted is not None]
    names = sorted({name for row in rows for name in row.baselines})
    return {
        "accept_length": total.accept_length,
        "interval_80": interval(counts, 0.80),
        "interval_95": interval(counts, 0.95),
        "num_requests": len(rows),
        "num_verifications": total.verifications,
        "num_accepted": total.accepted,
        "position_rates": total.position_rates,
        "predicted_accept_length": pool(predicted).accept_length if predicted else None,
        "baselines": {name: pool(_counts(row.baselines[name]) for row in rows).accept_length for name in names},
        "outputs": _outputs([row.outcome for row in rows]),
    }


def _counts(pair: tuple[int, int]) -> AcceptCounts:
    return AcceptCounts(verifications=pair[0], accepted=pair[1])


def _outputs(outcomes: list[Outcome]) -> dict[str, int]:
    return {"checked": len(outcomes)} | {name: outcomes.count(name) for name in ("identical", "tie", "wrong")}


def _timing(blocks: list[TimedBlock]) -> list[dict[str, Any]]:
    points = []
    for concurrency in dict.fromkeys(block.concurrency for block in blocks):
        at_point = [block for block in blocks if block.concurrency == concurrency]
        sides = {side: [block for block in at_point if block.side == side] for side in ("off", "on")}
        rates = {side: _rate(items) for side, items in sides.items()}
        # A-B-B-A: the n-th block of one side stands beside the n-th of the other.
        pairs = [_rate([on]) / _rate([off]) for off, on in zip(sides["off"], sides["on"], strict=True)]
        points.append(
            {
                "concurrency": concurrency,
                "speedup": rates["on"] / rates["off"],
                "speedup_min": min(pairs),
                "speedup_max": max(pairs),
                "block_pairs": len(pairs),
                "accept_length": pool(
                    AcceptCounts(verifications=block.verifications, accepted=block.accepted) for block in sides["on"]
                ).accept_length,
                **{f"tokens_per_s_{side}": rates[side] for side in sides},
                **{
                    f"latency_s_{side}": _percentiles([time for item in items for time in item.latencies_s])
                    for side, items in sides.items()
                },
                **{
                    f"first_token_s_{side}": _percentiles([time for item in items for time in item.first_tokens_s])
                    for side, items in sides.items()
                },
            }
        )
    return points


def _timing_of(dataset: str, blocks: list[TimedBlock]) -> list[dict[str, Any]]:
    """What one request of `dataset` sees at each number in flight: its own tokens per second and latency, by side."""
    points = []
    for concurrency in dict.fromkeys(block.concurrency for block in blocks):
        point: dict[str, Any] = {"concurrency": concurrency}
        for side in ("off", "on"):
            seen = [
                (tokens, latency_s)
                for block in blocks
                if block.concurrency == concurrency and block.side == side
                for name, tokens, latency_s in zip(block.datasets, block.reply_tokens, block.latencies_s, strict=True)
                if name == dataset
            ]
            if not seen:
                break  # none of its prompts was timed
            point[f"tokens_per_s_{side}"] = sum(tokens for tokens, _ in seen) / sum(latency_s for _, latency_s in seen)
            point[f"latency_s_{side}"] = _percentiles([latency_s for _, latency_s in seen])
            point["num_requests"] = len(seen)
        else:
            points.append(point | {"speedup": point["tokens_per_s_on"] / point["tokens_per_s_off"]})
    return points


def _rate(blocks: list[TimedBlock]) -> float:
    return sum(block.output_tokens for block in blocks) / sum(block.wall_s for block in blocks)


def _percentiles(times_s: list[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    return {f"p{percent}": float(np.percentile(times_s, percent)) for percent in (50, 90, 99)}
