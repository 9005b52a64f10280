"""Error and calibration of the forecast on simulated reference runs, and its replay on a real journal.

python -m benchmarks.forecast [--seeds 200] [--scale 1.0]
python -m benchmarks.forecast --replay runs/NAME
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.generation_model import LIMIT, Work, by_scheduler, rate, reference_work, simulate
from benchmarks.generation_replay import replayed_forecasts
from eyas.generation.forecast import DatasetOutlook, LengthSample, RateCurve, forecast

HOURS_AFTER = [0.0, 0.5, 1.0, 2.0, 4.0]
CHECKPOINTS = [0.005, 0.01, 0.02, 0.05, 0.10, 0.25, 0.50, 0.75]


Row = tuple[float, float, float, float, float]
"""Where it was made (share done, or hours after the shock), and straight line, median, low, high over the truth."""


def run_once(
    seed: int,
    *,
    scale: float,
    speed: Callable[[float], float] = lambda share: 1.0,
    shock_at: float = 0.0,
    context_cost: float = 0.0,
) -> list[Row]:
    """One simulated run and the time left that was forecast at each checkpoint, or hours after `shock_at` (share done)."""
    works = reference_work(np.random.default_rng(seed), scale=scale)
    total = sum(len(work.lengths) for work in works)
    samples = {id(work): LengthSample(work.cap) for work in works}
    curve, guesses = RateCurve(), []
    rng = np.random.default_rng(seed + 1_000_000)
    shares, hours = ([], list(HOURS_AFTER)) if shock_at else (list(CHECKPOINTS), [])
    last_seconds, last_tokens, seconds, shock_s = 0.0, 0.0, 0.0, 0.0
    for clock, work, number in simulate(works, by_scheduler, speed=speed, context_cost=context_cost):
        samples[id(work)].add(work.lengths[number], number)
        seconds = clock.seconds
        if clock.seconds - last_seconds >= 15.0:  # as the session measures: every 15 s, with 2 % of noise
            running = sum(len(work.flying) for work in works)
            measured = (clock.tokens - last_tokens) / (clock.seconds - last_seconds)
            curve.add(clock.seconds, running, measured * (1 + 0.02 * rng.standard_normal()), clock.context)
            last_seconds, last_tokens = clock.seconds, clock.tokens
        where = None
        if shares and clock.num_done >= shares[0] * total:
            where = shares.pop(0)
        if shock_at and not shock_s and clock.num_done >= shock_at * total:
            shock_s = clock.seconds
        if shock_s and hours and clock.seconds >= shock_s + 3600 * hours[0]:
            where = hours.pop(0)
        if where is not None:
            outlooks = [_outlook(work, samples[id(work)], clock.progress) for work in works]
            guess = forecast(outlooks, curve, LIMIT, seed=seed)
            if guess is not None:
                straight = clock.seconds / clock.num_done * (total - clock.num_done)
                guesses.append((where, clock.seconds, straight, guess.median_s, guess.low_s, guess.high_s))
    return [
        (where, straight / (seconds - at), median / (seconds - at), low / (seconds - at), high / (seconds - at))
        for where, at, straight, median, low, high in guesses
    ]


def _outlook(work: Work, sample: LengthSample, progress: float) -> DatasetOutlook:
    ages = [(progress - start, number) for number, start in work.flying.items()]
    return DatasetOutlook(
        name=work.share.name, sample=sample, num_pending=work.share.num_pending, ages=ages, prompt_tokens=work.prompt_tokens
    )


def drifted_datasets(seed: int, *, scale: float, drift: float) -> list[tuple[float, float]]:
    """(hours since a dataset's lengths changed, its forecast tokens left over the truth), for each that has hours to go."""
    works = reference_work(np.random.default_rng(seed), scale=scale, drift=drift)
    samples = {id(work): LengthSample(work.cap) for work in works}
    changed_at: dict[int, float] = {}
    asked: dict[int, list[float]] = {id(work): list(HOURS_AFTER) for work in works}
    curve, found = RateCurve(), []
    curve.add(0.0, LIMIT, rate(LIMIT))
    for clock, work, number in simulate(works, by_scheduler):
        key = id(work)
        samples[key].add(work.lengths[number], number)
        if work.next_index > len(work.lengths) // 2:
            changed_at.setdefault(key, clock.seconds)
        if key in changed_at and asked[key] and clock.seconds >= changed_at[key] + 3600 * asked[key][0]:
            hours = asked[key].pop(0)
            pending = work.lengths[work.next_index :]
            flying = [work.lengths[other] - (clock.progress - start) for other, start in work.flying.items()]
            if len(pending) > 500:  # with fewer the truth itself is mostly chance
                guess = forecast([_outlook(each, samples[id(each)], clock.progress) for each in works], curve, LIMIT, seed=seed)
                assert guess is not None
                found.append((hours, guess.tokens_left_by_dataset[work.share.name] / (sum(pending) + sum(flying))))
    return found


def table(title: str, runs: list[list[Row]], *, is_after_shock: bool = False) -> None:
    by_place: dict[float, list[tuple[float, ...]]] = defaultdict(list)
    for run in runs:
        for where, *rest in run:
            by_place[where].append(tuple(rest))
    print(f"\n{title}: {len(runs)} runs")
    place = "hours after" if is_after_shock else "done"
    print(f"| {place} | median abs error | mean error | straight line | covered by 80 % | half width |")
    print("|---|---|---|---|---|---|")
    for where, rows in sorted(by_place.items()):
        values = np.array(rows)
        covered = np.mean((values[:, 2] <= 1) & (values[:, 3] >= 1))
        print(
            f"| {f'{where:g}' if is_after_shock else f'{where:.1%}'} | {np.median(np.abs(values[:, 1] - 1)):.1%} "
            f"| {np.mean(values[:, 1] - 1):+.1%} | {np.median(np.abs(values[:, 0] - 1)):.1%} "
            f"| {covered:.0%} | {np.median(values[:, 3] - values[:, 2]) / 2:.1%} |",
            flush=True,
        )


def replay(folder: Path) -> None:
    """What the forecast would have said during a real run, from its journals."""
    print("| done | median of the time left, s | 80 % interval, s | truth, s | covered |")
    print("|---|---|---|---|---|")
    for share, guess, truth in replayed_forecasts(folder, CHECKPOINTS):
        is_inside = guess.low_s <= truth <= guess.high_s
        interval = f"{guess.low_s:.0f}–{guess.high_s:.0f}"
        print(f"| {share:.1%} | {guess.median_s:.0f} | {interval} | {truth:.0f} | {'yes' if is_inside else 'no'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 88,088 prompts")
    parser.add_argument("--replay", type=Path, help="a run folder whose journals are replayed instead")
    options = parser.parse_args()
    if options.replay:
        replay(options.replay)
        return
    print(f"peak {rate(LIMIT):.0f} tokens/s, scale {options.scale}")
    table("stationary", [run_once(seed, scale=options.scale) for seed in range(options.seeds)])
    cost = 1 / 8000
    title = "a token takes 1 + context / 8,000 as long"
    table(title, [run_once(seed, scale=options.scale, context_cost=cost) for seed in range(options.seeds)])
    shocks = [
        ("warm-up: 30 % of the speed until 1 % is done", 0.01, lambda share: 0.3 if share < 0.01 else 1.0),
        ("half of the servers lost at 40 %", 0.4, lambda share: 0.5 if share > 0.4 else 1.0),
    ]
    for title, shock_at, speed in shocks:
        runs = [run_once(seed, scale=options.scale, speed=speed, shock_at=shock_at) for seed in range(options.seeds)]
        table(title, runs, is_after_shock=True)
    print("\nlengths up by 25 % from each dataset's half on: tokens left of that dataset, hours after its half")
    print("| hours after | datasets | median abs error | mean error |\n|---|---|---|---|")
    ratios = [pair for seed in range(options.seeds) for pair in drifted_datasets(seed, scale=options.scale, drift=0.25)]
    for hours in HOURS_AFTER:
        values = np.array([ratio for at, ratio in ratios if at == hours])
        if len(values):
            print(f"| {hours:g} | {len(values)} | {np.median(np.abs(values - 1)):.1%} | {np.mean(values - 1):+.1%} |")


if __name__ == "__main__":
    main()
