"""The learning curve of a run: real small trainings on its records, and what plan, table and report make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.draft import curve
from eyas.draft.power_law import Point
from eyas.errors import ArtifactError
from eyas.files import read_json, write_json
from eyas.manifest import load_manifest
from eyas.operate import learning_curve as module
from eyas.operate.curve_result import RESULT, advice, read_curve, render_curve
from eyas.operate.learning_curve import curve_sizes, learning_curve, summary
from eyas.operate.tables import learning_curve as table_of
from eyas.workspace import RunFolder
from tests.draft.runs import learnable_records, run_config, write_run, write_target

K = 3


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The child's work done in this process, which spares seconds of imports; the arguments of each child."""
    children: list[list[str]] = []

    def in_child(arguments: list[str], **others: Any) -> None:
        children.append(arguments)
        assert arguments[:2] == ["-m", "eyas.draft.curve"]
        assert curve.main(arguments[2:]) == 0

    monkeypatch.setattr(module, "in_child", in_child)
    monkeypatch.setattr(curve, "stop_signals", list)
    return children


def finished(tmp_path: Path, **draft: Any) -> tuple[RunFolder, RunConfig]:
    target = write_target(tmp_path / "target")
    train = [replace(record, dataset="ab"[number % 2]) for number, record in enumerate(learnable_records(60))]
    run = write_run(tmp_path / "run", target, train, learnable_records(8, 1))
    config = run_config(target, max_steps=0, epochs=1, batch_tokens=64, **draft)
    load_manifest(run.merged).model_copy(update={"figures": {"order_entries": 60}}).write(run.merged)
    write_json(run.run_json, {"config": config.model_dump(mode="json")})
    return run, config


def test_a_finished_run_is_measured_on_its_own_order(tmp_path: Path, here: list[list[str]]) -> None:
    run, config = finished(tmp_path)
    result = learning_curve(run, config, share=1.0)
    assert [(point["records"], point["steps"]) for point in result["points"]] == [
        (12, 2),
        (12, 6),
        (30, 4),
        (30, 15),
        (60, 8),
        (60, 30),
    ]
    assert result["source"] == "whole run"
    assert result["points"][-1]["accept_length"] > result["points"][0]["accept_length"], "more data and steps teach more"
    assert read_json(run.root / RESULT) == result
    assert not (run.root / "learning-curve").exists()
    assert not run.draft.exists(), "the run's own training has not begun"


def test_a_fixed_number_of_steps_is_shared_out(tmp_path: Path, here: list[list[str]]) -> None:
    run, config = finished(tmp_path)
    fixed = config.model_copy(update={"draft": config.draft.model_copy(update={"max_steps": 20})})
    write_json(run.run_json, {"config": fixed.model_dump(mode="json")})
    points = learning_curve(run, fixed, share=0.2)["points"]
    assert {point["records"]: point["steps"] for point in points} == {12: 4, 30: 10, 60: 20}, "128 records at least, so all sixty"


def test_what_was_trained_before_an_interruption_is_not_trained_again(
    tmp_path: Path, here: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = finished(tmp_path)
    monkeypatch.setattr(module, "SIZES", (0.5, 1.0))
    monkeypatch.setattr(module, "MIN_RECORDS", 24)
    questions = iter(range(10**9))
    monkeypatch.setattr(curve, "stop_signals", lambda: _Stops(questions, after=5))
    with pytest.raises(AssertionError):  # the child's exit code is 130
        learning_curve(run, config, share=0.4)
    assert not (run.root / RESULT).exists()
    asked = next(questions)
    monkeypatch.setattr(curve, "stop_signals", lambda: _Stops(questions, after=10**9))
    result = learning_curve(run, config, share=0.4)
    assert next(questions) - asked < 23 - 2, "steps of the first points were taken once"
    fresh = learning_curve(run, config, share=0.4)
    assert result["points"] == fresh["points"], "and the curve is that of an unbroken one"


class _Stops:
    """A list of signals that is empty for the first `after` looks."""

    def __init__(self, questions: Any, after: int) -> None:
        self.questions, self.after = questions, after

    def __bool__(self) -> bool:
        return next(self.questions) >= self.after


def test_sizes_scale_with_the_run() -> None:
    assert curve_sizes(88_088, 88_088, 0.1136) == [2_001, 5_004, 10_007]
    assert curve_sizes(88_088, 6_000, 0.1136) == [1_200, 3_000, 6_000]
    assert curve_sizes(600, 600, 0.1) == [26, 64, 128]
    with pytest.raises(ArtifactError, match="1 training replies are there"):
        curve_sizes(600, 1, 0.1)


def result_of(rise: float) -> dict[str, Any]:
    points = [
        Point(records=n, steps=s, accept_length=2.5 - rise * (n / 2_000) ** -0.5 - 0.1 * (s / 500) ** -0.8, verifications=10**6)
        for n in (2_000, 5_000, 10_000)
        for s in (n // 4, n)
    ]
    return summary(points, 88_000, K) | {"baseline": None}


def test_the_advice_is_to_stop_where_the_rest_buys_nothing() -> None:
    rising, flat = result_of(0.8), result_of(0.0)
    assert rising["stop_share"] > 0.6
    assert flat["stop_share"] <= 0.1
    half = {row["share"]: row for row in rising["predictions"]}[0.5]
    exact = 0.8 * (22**-0.5 - 44**-0.5) + 0.1 * (88**-0.8 - 176**-0.8)
    assert half["rest_low"] <= exact <= half["rest_high"]
    assert f"the second half buys {half['rest_buys']:+.2f}" in advice(rising)
    assert "lose at most 0.02: enough" in advice(flat)
    assert "4,400 (5%)" not in render_curve(flat)


def test_the_gain_over_a_baseline_is_said() -> None:
    result = result_of(0.8) | {"baseline": {"accept_length": 2.0, "verifications": 100}}
    gain = {row["share"]: row for row in result["predictions"]}[1.0]["accept_length"] - 2.0
    assert f"reaches 2.00 on the same held-out replies: {gain:+.2f} to be gained" in advice(result)


def test_the_plan_weighs_a_subset_against_what_it_loses(run: RunFolder, config: RunConfig) -> None:
    from eyas.operate.plan import PlanKeeper, render_plan

    write_json(run.root / RESULT, result_of(0.8))
    plan = PlanKeeper(run, config).refresh()
    by_name = {row["name"]: row for row in plan["alternatives"]}
    half, whole = by_name["50% of every dataset"], by_name["all prompts, as configured"]
    assert half["accept_length"][0] < whole["accept_length"][0]
    assert half["accept_length_lost"] == pytest.approx(whole["accept_length"][0] - half["accept_length"][0], abs=0.03)
    assert by_name["replies capped at half"]["accept_length"] is None, "what a cap costs is not measured"
    text = render_plan(plan)
    assert f"{half['accept_length'][0]:.2f} ({half['accept_length'][1]:.2f}–{half['accept_length'][2]:.2f})" in text
    assert "## Learning curve" in text


def test_table_and_files_say_the_same(run: RunFolder) -> None:
    assert read_curve(run) is None
    assert table_of(run) is None
    write_json(run.root / RESULT, result_of(0.8))
    table = table_of(run)
    assert table is not None
    assert table.headline == advice(result_of(0.8))
    assert [row["records"] for row in table.rows[-6:]] == [8_800, 22_000, 44_000, 66_000, 88_000, 176_000]


def test_a_damaged_result_shows_nothing(run: RunFolder) -> None:
    for text in ('{"points": [', '{"points": []}', "[]"):
        (run.root / RESULT).write_text(text)
        assert read_curve(run) is None
