"""`results.json` and `report.md` from hand-made measurements."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.speculate.config import BenchmarkConfig, DraftShape
from eyas.speculate.contexts import by_context
from eyas.speculate.deploy import Check, decide, identity_checks, reservations, result_checks
from eyas.speculate.report import render_report
from eyas.speculate.results import GridPoint, Row, Sampled, SetMeasurement, TimedBlock, summarise


def row(id_: str, dataset: str, counts: tuple[int, int], **changes: Any) -> Row:
    values: dict[str, Any] = {
        "id": id_,
        "dataset": dataset,
        "prompt_ids": [1],
        "reference_ids": list(range(10)),
        "loop_free_tokens": 10,
        "draft_ids": list(range(10)),
        "outcome": "identical",
        "verifications": counts[0],
        "accepted": counts[1],
        "baselines": {"bigram": (10, 1), "prompt_lookup": (10, 2)},
        "predicted": (10, 6),
    }
    return Row.model_validate(values | changes)


def block(side: str, wall_s: float, **changes: Any) -> TimedBlock:
    values: dict[str, Any] = {
        "side": side,
        "concurrency": 1,
        "round": 0,
        "wall_s": wall_s,
        "output_tokens": 100,
        "datasets": ["b1", "b2"],
        "reply_tokens": [60, 40],
        "latencies_s": [wall_s / 2, wall_s / 2],
    }
    return TimedBlock.model_validate(values | changes)


@pytest.fixture
def measurements() -> list[SetMeasurement]:
    heldout = SetMeasurement(
        name="heldout",
        engine={"dtype": "float32"},
        rows=[row("a", "b1", (10, 5)), row("b", "b1", (30, 5)), row("c", "b2", (10, 10), loop_free_tokens=4)],
        blocks=[block("off", 4.0), block("on", 2.0, outcomes=["identical"]), block("on", 2.5, outcomes=["tie"]), block("off", 5.0)],
    )
    other = SetMeasurement(name="mt-bench", rows=[row("d", "mt-bench", (100, 0))], blocks=[])
    return [heldout, other]


def results_of(measurements: list[SetMeasurement]) -> dict[str, Any]:
    results = summarise(measurements, engine="embedded", num_draft_tokens=3, min_verifications=100)
    return results | {"by_context": by_context([row for item in measurements for row in item.rows], 10)}


def test_overall_pools_raw_counts_of_the_heldout_prompts(measurements: list[SetMeasurement]) -> None:
    accept = results_of(measurements)["accept_length"]
    assert accept["overall"] == pytest.approx(1 + 20 / 50)
    assert accept["per_dataset"] == {"b1": pytest.approx(1.25), "b2": pytest.approx(2.0)}
    assert accept["per_set"] == {"heldout": pytest.approx(1.4), "mt-bench": 1.0}
    assert (accept["num_verifications"], accept["num_accepted"], accept["overall_pools"]) == (50, 20, "heldout")
    assert accept["interval_95"] is accept["interval_80"] is None, "three replies"
    measurements[0].rows.extend(row(f"more-{n}", "b1", (10, n)) for n in range(8))  # 28 of 80
    accept = results_of(measurements)["accept_length"]
    pooled = 1 + 48 / 130
    assert accept["interval_95"][0] <= accept["interval_80"][0] <= pooled <= accept["interval_80"][1] <= accept["interval_95"][1]


def test_a_draft_that_a_drafter_without_model_beats_is_served_with_that_reservation(measurements: list[SetMeasurement]) -> None:
    results = results_of(measurements)
    assert reservations(results) == []
    lookup = results | {"baselines": {"bigram": 1.2, "prompt_lookup": 1.41}}
    decision = decide([], reservations(lookup))
    assert decision.serves_draft
    assert (
        decision.reason
        == "all checks hold, but see first whether it pays: prompt lookup reaches 1.410 without a model, the draft 1.400"
    )
    slow = results | {"speedup": 0.9}
    assert reservations(slow) == ["it makes replies slower (0.90×) at 1 in flight"]
    near = lookup | {"baselines": {"bigram": 1.2, "prompt_lookup": 1.39}}
    near["accept_length"] = near["accept_length"] | {"interval_95": [1.3, 1.5]}
    assert reservations(near) == ["prompt lookup reaches 1.390 without a model, within the draft's interval (95 %: 1.30–1.50)"]


def test_a_dataset_of_one_reply_has_no_interval(measurements: list[SetMeasurement]) -> None:
    results = results_of(measurements)
    assert results["per_dataset"]["b2"]["interval_95"] is None
    assert "| b2 | 2.000 | – | 10 |" in render_report(results)


def test_without_heldout_prompts_overall_pools_all_sets(measurements: list[SetMeasurement]) -> None:
    accept = results_of(measurements[1:])["accept_length"]
    assert (accept["overall"], accept["overall_pools"]) == (1.0, "all sets")


def test_verifications_wanted_are_those_that_the_accept_length_rests_on(measurements: list[SetMeasurement]) -> None:
    assert not results_of(measurements)["accept_length"]["has_enough_verifications"], "50 held-out ones; other sets do not count"
    assert "That is 50 verifications, fewer than the 100 wanted" in render_report(results_of(measurements))
    assert results_of(measurements[1:])["accept_length"]["has_enough_verifications"]


def test_every_reply_with_the_draft_is_checked(measurements: list[SetMeasurement]) -> None:
    assert results_of(measurements)["outputs"] == {"checked": 6, "identical": 5, "tie": 1, "wrong": 0}


def test_speedup_is_the_ratio_of_rates_with_the_spread_of_its_pairs(measurements: list[SetMeasurement]) -> None:
    results = results_of(measurements)
    assert results["speedup"] == pytest.approx((200 / 4.5) / (200 / 9.0))
    point = results["timing"][0]
    assert (point["speedup_min"], point["speedup_max"], point["block_pairs"]) == (pytest.approx(2.0), pytest.approx(2.0), 2)
    assert point["latency_s_off"]["p50"] == pytest.approx(2.25)
    assert point["first_token_s_on"] is None


def test_one_request_of_each_dataset_has_its_own_rate_and_latency(measurements: list[SetMeasurement]) -> None:
    """Replies of 60 tokens of b1 in 2 and 2.5 s without the draft, in 1 and 1.25 s with it."""
    results = results_of(measurements)
    (point,) = results["per_dataset"]["b1"]["timing"]
    assert (point["concurrency"], point["num_requests"]) == (1, 2)
    assert point["tokens_per_s_off"] == pytest.approx(120 / 4.5)
    assert point["speedup"] == pytest.approx(2.0)
    assert point["latency_s_on"]["p50"] == pytest.approx(1.125)
    assert "| b1 | 2.00× | 26.7 | 53.3 | 2.25 → 1.12 s |" in render_report(results)
    for item in measurements[0].blocks:
        item.datasets = ["b2", "b2"]
    assert results_of(measurements)["per_dataset"]["b1"]["timing"] == [], "none of its prompts was timed"


def test_break_even_is_the_load_from_which_on_every_shape_loses(measurements: list[SetMeasurement]) -> None:
    """2.0 at one in flight, 0.8 at four by chance, 1.25 at eight, 0.5 at sixteen, 0.8 at thirty-two."""
    for concurrency, off_s in ((4, 0.8), (8, 1.25), (16, 0.5), (32, 0.8)):
        measurements[0].blocks += [block("off", off_s, concurrency=concurrency), block("on", 1.0, concurrency=concurrency)]
    results = results_of(measurements)
    assert results["break_even_concurrency"] == 16
    assert "Break-even lies between 8 and 16 requests in flight" in render_report(results)
    assert results["best"][1] == {"concurrency": 4, "shape": None, "speedup": 1.0}
    measurements[0].blocks = [item for item in measurements[0].blocks if item.concurrency <= 8]
    assert results_of(measurements)["break_even_concurrency"] is None
    assert "pays at 1, 8 in flight; elsewhere its gain is within" in render_report(results_of(measurements))
    measurements[0].blocks = [item for item in measurements[0].blocks if item.concurrency in (1, 8)]
    assert "pays at every number of requests in flight" in render_report(results_of(measurements))


def test_a_gain_within_the_spread_is_no_gain_for_break_even_either(measurements: list[SetMeasurement]) -> None:
    """Faster by 1.08 on average at every load, by one lucky pair of two: the page may not say both "pays" and "no draft"."""
    lucky = [("off", 1.0), ("on", 1.1), ("on", 0.8), ("off", 1.05)]
    measurements[0].blocks = [block(side, wall_s, concurrency=load) for load in (1, 8) for side, wall_s in lucky]
    results = results_of(measurements)
    assert results["timing"][0]["speedup"] > 1.05
    assert (results["break_even_concurrency"], [item["shape"] for item in results["best"]]) == (1, [None, None])
    text = render_report(results)
    assert "At no number of requests in flight that was measured does the draft gain" in text
    assert "550 → 475 ms" in text or "512 → 475 ms" in text, "times below a second in milliseconds"


def test_baselines_and_prediction_stand_beside_the_draft(measurements: list[SetMeasurement]) -> None:
    results = results_of(measurements)
    assert results["baselines"] == {"bigram": pytest.approx(1.1), "prompt_lookup": pytest.approx(1.2)}
    assert results["predicted_accept_length"] == pytest.approx(1.6)
    assert results["beats_baselines"]


def test_report_says_the_definition_and_raw_counts(measurements: list[SetMeasurement]) -> None:
    text = render_report(results_of(measurements))
    assert "1 + accepted drafts / verifications" in text
    assert "20 accepted in 50 verifications" in text
    assert "1 of 4 replies fell into a loop; 6 of 40 tokens" in text


def checks_of(measurements: list[SetMeasurement], **config: Any) -> dict[str, Check]:
    return {check.name: check for check in result_checks(results_of(measurements), BenchmarkConfig.model_validate(config))}


def test_served_length_far_from_the_replay_stops_the_deployment(measurements: list[SetMeasurement]) -> None:
    """Output right, accept length collapsed: https://github.com/vllm-project/vllm/pull/50170 (2.77 became 1.036)."""
    checks = checks_of(measurements)
    assert not checks["prediction"].holds  # 1.4 served, 1.6 replayed
    decision = decide(list(checks.values()))
    assert not decision.serves_draft
    assert "served 1.400, replayed 1.600" in decision.reason
    assert checks_of(measurements, prediction_tolerance=0.2)["prediction"].holds


def test_wrong_reply_or_low_accept_length_stops_the_deployment(measurements: list[SetMeasurement]) -> None:
    measurements[1].rows[0].outcome = "wrong"
    assert not checks_of(measurements)["replies"].holds
    assert not checks_of(measurements, accept_floor=1.5)["accept length"].holds


def test_all_checks_holding_serve_the_draft(measurements: list[SetMeasurement]) -> None:
    assert decide(list(checks_of(measurements, prediction_tolerance=0.2).values())).serves_draft


def test_server_without_the_draft_fails_its_identity() -> None:
    good = {
        "model_path": "/m",
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/d",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    wanted: dict[str, Any] = {"target": "/m", "draft": "/d", "shape": DraftShape(num_steps=3)}
    assert all(check.holds for check in identity_checks(good, **wanted))
    for key in good:
        failed = [check.name for check in identity_checks(good | {key: None}, **wanted) if not check.holds]
        assert failed == [key]


def test_best_shape_per_load_is_one_whose_slowest_pair_still_gained(measurements: list[SetMeasurement]) -> None:
    """K=3: 2.0 at one in flight. K=5: 2.5 in the mean, but one pair lost; at eight every shape loses."""
    measurements[0].blocks += [block("off", 1.0, concurrency=8), block("on", 1.5, concurrency=8)]
    blocks = [block("off", 4.0), block("on", 1.0), block("on", 4.0), block("off", 3.8)]
    blocks += [block("off", 1.0, concurrency=8), block("on", 1.25, concurrency=8)]
    counts = {"verifications": 20, "accepted": 30, "histogram": [4, 6, 6, 4], "outcomes": ["identical", "wrong"]}
    measurements[0].grid.append(GridPoint(shape=DraftShape(num_steps=5), blocks=blocks, **counts))
    results = results_of(measurements)
    assert [shape["shape"] for shape in results["grid"]] == ["K=3", "K=5"]
    assert results["grid"][1]["accept_length"] == pytest.approx(2.5)
    assert results["grid"][1]["position_rates"] == pytest.approx([16 / 20, 10 / 16, 4 / 10])
    assert results["best"] == [
        {"concurrency": 1, "shape": "K=3", "speedup": pytest.approx(2.0)},
        {"concurrency": 8, "shape": None, "speedup": 1.0},
    ]
    assert results["outputs"]["wrong"] == 1
    text = render_report(results)
    assert "| K=5 | 2.500 | 20 |" in text
    assert "K=3 (2.00×) at 1; no draft at 8" in text


def test_a_distribution_that_differs_stops_the_deployment(measurements: list[SetMeasurement]) -> None:
    measurements[0].sampled = [Sampled(off=[[1, 2]] * 30, on=[[1, 3]] * 30)]
    check = checks_of(measurements)["distribution at temperature 1"]
    assert not check.holds
    assert "30 replies a side" in check.seen
