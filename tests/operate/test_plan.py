"""Forecasts against arithmetic done by hand, and the plan that carries them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from eyas.config import RunConfig, load_config
from eyas.errors import ConfigError
from eyas.files import read_json
from eyas.operate.alternatives import alternatives
from eyas.operate.decision import Declined, decide
from eyas.operate.forecast import TargetSizes, forecast
from eyas.operate.plan import PlanKeeper, check_budget, check_disk, render_plan
from eyas.operate.status import read_status
from eyas.operate.volumes import volumes
from eyas.progress import Progress, recorder
from eyas.workspace import RunFolder
from tests.operate.conftest import DATASETS, write_prompts

SIZES = TargetSizes(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    num_layers=8,
    vocab_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
)


def phase(outlook: object, name: str) -> object:
    return next(item for item in outlook.phases if item.phase == name)  # type: ignore[attr-defined]


def test_before_anything_ran_the_config_gives_the_volume(run: RunFolder, config: RunConfig) -> None:
    counted = volumes(run, config)
    assert counted.num_prompts == 200
    assert counted.prompt_tokens == 200 * 300
    assert counted.response_tokens == counted.cap_tokens == 200 * 50  # the cap is below the assumed mean
    assert "assumed" in counted.basis


def test_counts_replace_assumptions(half_run: RunFolder, config: RunConfig) -> None:
    first, second = volumes(half_run, config).datasets
    assert (first.prompt_tokens, first.response_tokens, first.is_counted) == (4 + 5 + 6 + 7, 100, True)
    assert (second.prompt_tokens, second.response_tokens, second.is_counted) == (22, 4 * 50, False)


def test_the_store_of_states_is_eight_bytes_per_width_and_token(half_run: RunFolder, config: RunConfig) -> None:
    outlook = forecast(config, SIZES, volumes(half_run, config))
    assert phase(outlook, "extract").disk_bytes == (22 + 100 + 22 + 200) * (2 * 4 * 32 + 5)  # type: ignore[attr-defined]


def test_draft_parameters_are_those_of_its_tensors(config: RunConfig) -> None:
    fc, attention, mlp, head = 3 * 32 * 32, (32 + 16 + 16) * 64 + 32 * 32, 3 * 32 * 64, 64 * 32
    assert SIZES.draft_parameters(config) == fc + attention + mlp + head


def test_finished_phases_need_nothing(finished_run: RunFolder, config: RunConfig) -> None:
    statuses = {item.phase: item for item in read_status(finished_run.root).phases}
    outlook = forecast(config, SIZES, volumes(finished_run, config), statuses)
    assert outlook.disk_bytes_to_write == 0
    assert outlook.hours == 0


def test_a_running_phase_is_forecast_by_what_it_says(half_run: RunFolder, config: RunConfig) -> None:
    recorder(half_run.progress)(
        Progress(stage="generate", name="B2_code", done=1, total=4, unit="records", figures={"remaining_s": 7200})
    )
    statuses = {item.phase: item for item in read_status(half_run.root).phases}
    item = phase(forecast(config, SIZES, volumes(half_run, config), statuses), "generate")
    assert item.hours == pytest.approx(2.0)  # type: ignore[attr-defined]
    assert item.basis == "measured in this run"  # type: ignore[attr-defined]


def test_servers_nobody_measured_have_no_hours(run: RunFolder, config: RunConfig, config_file: Callable[..., Path]) -> None:
    served = load_config(config_file(server={"kind": "sglang", "urls": ["http://127.0.0.1:1"]}))
    outlook = forecast(served, SIZES, volumes(run, served))
    assert outlook.hours is None
    assert "probe-server" in phase(outlook, "generate").basis  # type: ignore[attr-defined]


def test_alternatives_cost_in_proportion(run: RunFolder, config: RunConfig) -> None:
    statuses = {item.phase: item for item in read_status(run.root).phases}
    codecs = {"codecs": {"int4": {"replay": None, "faults": []}}}
    rows = {row["name"]: row for row in alternatives(config, SIZES, volumes(run, config), statuses, None, codecs)}
    coded = next(row for row in rows.values() if row["set"] == "hidden.codec=int4")
    whole, half = rows["all prompts, as configured"], rows["50% of every dataset"]
    assert half["set"] == "prompts.subsample=0.5"
    assert (half["prompts"], half["tokens"]) == (100, 5_000)
    assert 0.45 * whole["hours"] < half["hours"] < whole["hours"]
    assert half["disk_bytes"] < whole["disk_bytes"]
    assert rows["replies capped at half"]["tokens"] == 5_000
    window = next(row for row in rows.values() if "disk_budget" in row["set"])
    assert window["hours"] > whole["hours"]  # extraction in every epoch
    assert window["disk_bytes"] < whole["disk_bytes"]
    budget = int(window["set"].partition("=")[2])
    budgeted = config.model_copy(update={"hidden": config.hidden.model_copy(update={"disk_budget": budget})})
    back = [row for row in alternatives(budgeted, SIZES, volumes(run, config), statuses) if row["set"] == "hidden.disk_budget=0"]
    assert [(row["hours"], row["disk_bytes"]) for row in back] == [(whole["hours"], whole["disk_bytes"])]
    saved = 8 * SIZES.hidden_size - (3 * SIZES.hidden_size * 4.5 + SIZES.hidden_size * 8.5) / 8  # bytes a token
    assert whole["disk_bytes"] - coded["disk_bytes"] == round(saved * volumes(run, config).merged_tokens)


def test_a_budget_that_heldout_states_would_fill_is_refused_with_numbers(run: RunFolder, config: RunConfig) -> None:
    tokens = round(volumes(run, config).merged_tokens * config.prompts.heldout_share)
    need = tokens * (8 * SIZES.hidden_size + 5)
    for budget, is_refused in ((need, True), (round(need * 8 / 7) + 20, False)):
        tight = config.model_copy(update={"hidden": config.hidden.model_copy(update={"disk_budget": budget})})
        outlook = forecast(tight, SIZES, volumes(run, tight))
        assert phase(outlook, "extract").disk_bytes == budget  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=f"{tokens:,} tokens.*raise it to at least") if is_refused else nullcontext():
            check_budget(outlook, tight, SIZES.hidden_size)


def test_without_quotas_nothing_is_known_before_phase_1(run: RunFolder, config_file: Callable[..., Path]) -> None:
    config = load_config(config_file(), ["prompts.datasets.1.quota=0"])
    plan = PlanKeeper(run, config).refresh()
    for row in plan["alternatives"]:
        assert [row[key] for key in ("prompts", "tokens", "hours", "disk_bytes")] == [None] * 4
    text = render_plan(plan)
    assert "| all prompts, as configured |  | unknown | unknown | unknown |  | unknown |" in text
    assert "Still to be written: unknown, at least" in text
    outlook = forecast(config, SIZES, volumes(run, config))
    assert [item.is_known for item in outlook.phases] == [False] * 5 + [True]
    write_prompts(run, DATASETS[1], [4, 5])
    assert "unknown" not in render_plan(PlanKeeper(run, config).refresh())


def test_too_small_a_disk_is_refused_with_numbers(run: RunFolder, config: RunConfig) -> None:
    outlook = forecast(config, SIZES, volumes(run, config))
    check_disk(outlook, config, outlook.disk_bytes_to_write, "here")
    with pytest.raises(ConfigError, match=r"here has .* free; the run still writes about"):
        check_disk(outlook, config, outlook.disk_bytes_to_write - 1, "here")


def test_plan_is_kept_current(half_run: RunFolder, config: RunConfig) -> None:
    keeper = PlanKeeper(half_run, config)
    keeper.start("generate")
    plan = read_json(half_run.plan_json)
    assert [(row["phase"], row["state"], row["priority"]) for row in plan["phases"]][:3] == [
        ("prepare", "done", 0),
        ("generate", "running", 1),
        ("merge", "waiting", 2),
    ]
    keeper.fail("generate", "the server\nwent away")
    assert "**Generate responses**: the server went away" in half_run.plan_md.read_text()
    assert read_status(half_run.root).state == "failed"
    PlanKeeper(half_run, config).start("generate")  # another process takes the run up
    assert read_status(half_run.root).state == "running"


def test_phase_of_a_killed_process_is_not_running(half_run: RunFolder, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    PlanKeeper(half_run, config).start("merge")
    monkeypatch.setattr("eyas.operate.status.is_alive", lambda pid: False)
    assert read_status(half_run.root).phases[2].state == "waiting"


def test_accepted_by_the_config_is_recorded_once(run: RunFolder, config: RunConfig) -> None:
    for _ in range(2):
        decide(PlanKeeper(run, config), config, lambda text, timeout_s: pytest.fail("nobody is to be asked"))
    decisions = read_json(run.plan_json)["decisions"]
    assert [(item["who"], item["what"]) for item in decisions] == [("config", "accept")]
    assert "operate.decision is accept" in run.plan_md.read_text()


@pytest.mark.parametrize(
    ("answer", "default", "goes_on"),
    [("y\n", "abort", True), ("no\n", "accept", False), (None, "accept", True), (None, "abort", False)],
)
def test_a_person_or_the_default_decides(
    answer: str | None, default: str, goes_on: bool, run: RunFolder, config_file: Callable[..., Path]
) -> None:
    config = load_config(config_file(operate={"decision": "ask", "decision_default": default, "decision_timeout_s": 5}))
    keeper = PlanKeeper(run, config)
    asked: list[str] = []

    def ask(text: str, timeout_s: float) -> str | None:
        asked.append(text)
        return answer

    if goes_on:
        decide(keeper, config, ask)
    else:
        with pytest.raises(Declined):
            decide(keeper, config, ask)
    assert "## Alternatives" in asked[0]
    assert keeper.is_accepted is goes_on


def test_only_what_is_timed_is_priced_at_one_request_alone(run: RunFolder, config: RunConfig) -> None:
    """Two sets of 20 prompts and 100 tokens: counted twice in batches; timed with 6 prompts off, on, on, off, in 2 rounds."""
    update = {"sets": ["heldout", "mt-bench"], "prompts_per_set": 20, "max_new_tokens": 100, "timed_prompts": 6}
    benchmark = config.benchmark.model_copy(update=update | {"repeats": 2, "concurrency": [1]})
    config = config.model_copy(update={"benchmark": benchmark})
    hours = phase(forecast(config, SIZES, volumes(run, config)), "bench").hours
    per_token = 2 * SIZES.num_parameters / (os.cpu_count() or 1) / 3600
    assert hours == pytest.approx(per_token * (2 * 2 * 20 * 100 / 30e9 + 2 * 4 * 2 * 6 * 100 / 2e9))
