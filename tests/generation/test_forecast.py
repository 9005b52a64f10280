"""The forecast against simulated truth, and the statistics, scheduler and watch beside it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks.generation_model import by_scheduler, rate, reference_work, simulate, with_barrier
from eyas.generation.forecast import DatasetOutlook, LengthBins, LengthSample, RateCurve, _normal_tail, forecast
from eyas.generation.scheduler import Share, choose
from eyas.generation.statistics import LengthStatistics
from eyas.generation.watch import ServerLook, Snapshot, Watch


def measured(tokens_per_s: float = 1000.0) -> RateCurve:
    curve = RateCurve()
    for minute in range(30):
        curve.add(60.0 * minute, 64, tokens_per_s)
    return curve


def slowdown(curve: RateCurve, context: float) -> float:
    return float(np.median(curve.slowdown(np.full(200, context), np.random.default_rng(0))))


def observe(lengths: list[int], cap: int, age: int, started: int) -> tuple[LengthSample, list[tuple[float, int]]]:
    """`started` requests, all sent `age` tokens ago: the short ones are finished, the long ones in flight."""
    sample, ages = LengthSample(cap), []
    for number, length in enumerate(lengths[:started]):
        if length <= age:
            sample.add(length, number)
        else:
            ages.append((float(age), number))
    return sample, ages


def test_censored_replies_count_so_the_mean_is_right_before_most_have_finished() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(6.5, 1.1, 4000)), 2, 8192).astype(int).tolist()
    sample, ages = observe(lengths, 8192, age=900, started=1500)
    finished_mean = np.mean([length for length in lengths[:1500] if length <= 900])
    guess = forecast([DatasetOutlook(name="a", sample=sample, num_pending=2500, ages=ages)], measured(), 64)
    assert guess is not None
    truth = np.mean(lengths)
    assert abs(guess.mean_tokens["a"] / truth - 1) < 0.12
    assert finished_mean < 0.4 * truth, "what a straight line would take"


def test_the_interval_holds_the_truth_about_eight_times_in_ten() -> None:
    inside = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = np.clip(np.exp(rng.normal(6.0, 1.0, 3000)), 2, 4096).astype(int).tolist()
        sample, ages = observe(lengths, 4096, age=1500, started=300)
        guess = forecast([DatasetOutlook(name="a", sample=sample, num_pending=2700, ages=ages)], measured(), 1, seed=seed)
        assert guess is not None
        left = sum(lengths[300:]) + sum(length - 1500 for length in lengths[:300] if length > 1500)
        inside += guess.low_s * guess.tokens_per_s <= left <= guess.high_s * guess.tokens_per_s
    assert 24 <= inside <= 39


def test_a_cap_ends_every_reply() -> None:
    sample = LengthSample(100)
    for number in range(200):
        sample.add(100, number)
    guess = forecast([DatasetOutlook(name="a", sample=sample, num_pending=100)], measured(), 64)
    assert guess is not None
    assert guess.mean_tokens["a"] == pytest.approx(100, rel=0.03)


def test_nothing_is_said_before_throughput_is_measured() -> None:
    assert forecast([DatasetOutlook(name="a", sample=LengthSample(10), num_pending=5)], RateCurve(), 4) is None


def test_the_rate_curve_finds_peak_and_saturation() -> None:
    curve, rng = RateCurve(), random.Random(0)
    for second in range(200):
        running = 1 + second // 2
        curve.add(8.0 * second, running, 1350 * (1 - math.exp(-running / 16)) * rng.uniform(0.98, 1.02))
    peak, scale, error = curve.fit()
    assert peak == pytest.approx(1350, rel=0.02)
    assert scale == pytest.approx(16, rel=0.15)
    assert error < 0.05


def test_the_cost_of_context_is_found_and_other_servers_are_not_taken_for_it() -> None:
    """A token at context c takes 1 + c / 4,000 times as long; half-way the servers become half as fast."""
    curve, rng = RateCurve(), random.Random(0)
    for look in range(2000):
        context = 1000 + 2000 * (look % 500) / 500
        speed = 1.0 if look < 1200 else 0.5
        curve.add(15.0 * look, 64, speed * 1350 / (1 + context / 4000) * rng.uniform(0.98, 1.02), context)
        if look in (1100, 1999):
            recent = [item[3] for item in curve._recent]
            today = sorted(recent)[len(recent) // 2]
            for future in (500, 2000, 6000):
                assert slowdown(curve, future) == pytest.approx((1 + future / 4000) / (1 + today / 4000), rel=0.05)


@pytest.mark.parametrize("contexts", [(0, 0), (1000, 1200), (1000, 3000)])
def test_without_a_cost_or_a_range_of_contexts_none_is_claimed(contexts: tuple[int, int]) -> None:
    curve, rng = RateCurve(), random.Random(0)
    for look in range(600):
        curve.add(15.0 * look, 64, 1350 * rng.uniform(0.98, 1.02), rng.uniform(*contexts))
    assert slowdown(curve, 8000) == pytest.approx(1.0, abs=0.05)


def test_longer_contexts_ahead_take_longer() -> None:
    curve = RateCurve()
    for look in range(600):
        context = 1000 + 1000 * (look % 100) / 100
        curve.add(float(look), 64, 1000 / (1 + context / 2000), context)
    sample = LengthSample(200)
    for number in range(400):
        sample.add(100 + number % 3, number)
    short, long = (
        forecast([DatasetOutlook(name="a", sample=sample, num_pending=5000, prompt_tokens=prompt)], curve, 64)
        for prompt in (1000, 7000)
    )
    assert short is not None
    assert long is not None
    wanted = (1 + 7050 / 2000) / (1 + 1050 / 2000)  # half an answer beside the prompt
    assert long.median_s / short.median_s == pytest.approx(wanted, rel=0.05)


def test_an_unsure_cost_of_context_and_unsure_lengths_widen_the_interval() -> None:
    """Measured with 10 % of noise, the draws of the cost hold the truth; and longer answers mean longer contexts as well."""
    spreads = []
    for noise in (0.01, 0.1):
        curve, rng = RateCurve(), random.Random(0)
        for look in range(400):
            context = 1000 + 1500 * (look % 100) / 100
            curve.add(15.0 * look, 64, 1000 / (1 + context / 4000) * rng.gauss(1, noise), context)
        draws = curve.slowdown(np.full(400, 8000.0), np.random.default_rng(0))
        today = sorted(item[3] for item in curve._recent)[len(curve._recent) // 2]
        low, high = np.quantile(draws, [0.02, 0.98])
        assert low < (1 + 8000 / 4000) / (1 + today / 4000) < high
        spreads.append(high - low)
    assert spreads[1] > 3 * spreads[0]


@pytest.mark.parametrize("cap", [2, 20, 33, 100, 10_240])
def test_every_length_has_one_bin_and_the_cap_its_own(cap: int) -> None:
    bins = LengthBins(cap)
    for length in {1, 2, cap // 2, cap - 1, cap} - {0}:
        index = bins.index(length)
        assert bins.edges[index] <= length < bins.edges[index + 1]
    assert bins.index(cap + 5) == len(bins.lengths) - 1
    assert bins.lengths[-1] == cap


def test_the_normal_tail_agrees_with_the_library() -> None:
    for z in (-3.0, -0.5, 0.0, 0.7, 4.0):
        assert float(_normal_tail(np.array(z))) == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=2e-7)


def test_drifted_lengths_are_forgotten() -> None:
    rng, sample = np.random.default_rng(0), LengthSample(4096)
    for number in range(256 * 8):
        sample.add(int(np.exp(rng.normal(5 if number < 1024 else 6, 0.8))), number)
    events, first = sample.events()
    assert 768 <= first <= 1280
    assert events.sum() == 256 * 8 - first


def test_statistics_are_right_to_a_percent() -> None:
    rng, statistics = np.random.default_rng(0), LengthStatistics()
    lengths = np.exp(rng.normal(6, 1, 3000)).astype(int) + 1
    for length in lengths:
        statistics.add_entry(
            {
                "output_ids": range(int(length)),
                "prompt_tokens": 10,
                "cached_tokens": 5,
                "finish_reason": "stop",
                "spans": {"reasoning": None},
                "is_closed": False,
                "text_match": "exact",
                "attempt": 1,
            }
        )
    for share in (0.5, 0.9, 0.99):
        assert statistics.quantile(share) == pytest.approx(np.quantile(lengths, share), rel=0.02)
    assert statistics.figures()["share_cached_tokens"] == 0.5


def test_the_schedule_comes_within_three_percent_of_the_bound() -> None:
    makespans = {}
    for name, pick in (("eyas", by_scheduler), ("barrier", with_barrier)):
        works = reference_work(np.random.default_rng(0), scale=0.03)
        bound = sum(sum(work.lengths) for work in works) / rate(96)
        for clock, _, _ in simulate(works, pick):
            makespans[name] = clock.seconds / bound
    assert makespans["eyas"] < 1.03
    assert makespans["eyas"] < makespans["barrier"]


def test_every_dataset_has_its_floor_and_its_early_samples() -> None:
    shares = [Share(name=name, num_pending=1000, mean_tokens=mean) for name, mean in (("long", 9000.0), ("short", 100.0))]
    for _ in range(400):
        share = choose(shares, 100, 0.05)
        assert share is not None
        share.start()
    assert min(share.num_started for share in shares) >= 128
    assert shares[0].num_started > shares[1].num_started


def snapshot(seconds: float, **changes: object) -> Snapshot:
    usual = {
        "in_flight": 60,
        "capacity": 64,
        "tokens_per_s": 1000.0,
        "since_progress_s": 1.0,
        "longest_reply_s": 20.0,
        "free_bytes": 10**12,
        "bytes_needed": 1e9,
    }
    return Snapshot(seconds=seconds, **{**usual, **changes})


def kinds(watch: Watch, *snapshots: Snapshot) -> list[tuple[str, bool]]:
    return [(event.kind, event.is_over) for item in snapshots for event in watch.look(item)]


def test_a_stall_begins_once_and_ends() -> None:
    watch = Watch()
    stalled = [snapshot(second, since_progress_s=400.0) for second in range(5)]
    assert kinds(watch, snapshot(0), *stalled, snapshot(9)) == [("stalled", False), ("stalled", True)]


def test_a_pause_is_no_stall() -> None:
    assert kinds(Watch(), snapshot(0, since_progress_s=9999.0, pauses={"disk": "full"})) == [("paused", False)]


def test_half_the_usual_throughput_is_slow() -> None:
    watch = Watch()
    assert kinds(watch, *(snapshot(second) for second in range(30))) == []
    assert kinds(watch, *(snapshot(second, tokens_per_s=400.0) for second in range(30))) == [("slow", False)]


def test_too_little_disk_is_an_event_before_it_is_full() -> None:
    assert kinds(Watch(), snapshot(0, free_bytes=10**8)) == [("disk", False)]


def server(**changes: object) -> ServerLook:
    usual = {"state": "ready", "running": 32, "tokens_per_s": 900.0, "token_usage": 0.6, "kv_tokens": 10**5, "num_retractions": 0}
    return ServerLook(url="http://s", **{**usual, **changes})


def test_servers_that_fall_silent_or_retract_are_events() -> None:
    assert kinds(Watch(), snapshot(0, servers=[server(state="open")])) == [("server_down", False)]
    watch = Watch()
    assert kinds(watch, *looks({}, {"num_retractions": 3})) == [("retracting", False)]


def looks(*changes: dict[str, float]) -> list[Snapshot]:
    return [snapshot(number, servers=[server(**change)]) for number, change in enumerate(changes)]


def test_a_server_that_falls_at_equal_load_is_an_event_and_one_that_recovers_ends_it() -> None:
    usual, slow = [{"tokens_per_s": 900.0}] * 60, [{"tokens_per_s": 500.0}] * 60
    assert kinds(Watch(), *looks(*usual, *slow, *usual)) == [("falling", False), ("falling", True)]


def test_noise_longer_contexts_and_fewer_requests_are_no_fall() -> None:
    """Between two looks a real server's throughput jumped between 160 and 630 tokens/s; its best look is no measure."""
    rng = random.Random(0)
    noisy = [{"tokens_per_s": rng.uniform(160, 630)} for _ in range(300)]
    assert kinds(Watch(), *looks(*noisy)) == []
    fuller = [{"token_usage": 0.3, "tokens_per_s": 900.0}] * 60 + [{"token_usage": 0.8, "tokens_per_s": 500.0}] * 60
    fewer = [{"running": 64, "tokens_per_s": 900.0}] * 60 + [{"running": 8, "tokens_per_s": 300.0}] * 60
    assert kinds(Watch(), *looks(*fuller)) == kinds(Watch(), *looks(*fewer)) == []


def test_a_machine_whose_speed_wanders_widens_the_interval_and_noise_does_not() -> None:
    """Equal spread between looks: as noise it averages out, as slow waves it says that the future may lie anywhere among them."""
    rng = np.random.default_rng(0)
    errors = {}
    for name, factors in {"noise": rng.permutation(np.sin(np.arange(120) / 15)), "waves": np.sin(np.arange(120) / 15)}.items():
        curve = RateCurve()
        for number, factor in enumerate(factors):
            curve.add(15.0 * number, 96, 1300 * (1 + 0.3 * factor))
        errors[name] = curve.fit()[2]
    assert errors["noise"] < 0.05
    assert 0.12 < errors["waves"] < 0.3


def test_contexts_that_grow_are_no_wandering() -> None:
    """A rate that falls because contexts grow is the slope's business: counted once, not as a machine that may do anything."""
    curve = RateCurve()
    for number in range(120):
        context = 500 + 25 * number
        curve.add(15.0 * number, 96, 1300 / (1 + context / 8000), context)
    assert curve.fit()[2] < 0.01
