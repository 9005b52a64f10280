"""The whole grid on the embedded engine: every load and shape, end to end, to `results.json` and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.speculate.benchmark import benchmark
from tests.speculate.fitted_run import fitted_run

LOADS = [1, 2, 4, 8, 16, 32, 64]
STEPS = (3, 2, 5)


@pytest.mark.soak
def test_every_load_and_shape_is_measured_and_the_figures_follow(model: Any, tmp_path: Path) -> None:
    grid = [{"num_steps": steps} for steps in STEPS[1:]]
    run, config = fitted_run(model, tmp_path, concurrency=LOADS, grid=grid, sampled_replies=60, repeats=2)
    benchmark(run, config)
    results = json.loads((run.benchmark / "results.json").read_text())
    assert [shape["shape"] for shape in results["grid"]] == [f"K={steps}" for steps in STEPS]
    for shape in results["grid"]:
        assert [point["concurrency"] for point in shape["timing"]] == LOADS
        assert len(shape["position_rates"]) <= shape["num_steps"]
        assert 1 < shape["accept_length"] <= shape["num_steps"] + 1
        for point in shape["timing"]:
            assert point["block_pairs"] == 4
            assert point["speedup_min"] <= point["speedup"] <= point["speedup_max"]
            for side in ("off", "on"):
                latency, first = point[f"latency_s_{side}"], point[f"first_token_s_{side}"]
                assert 0 < first["p50"] <= latency["p50"] <= latency["p90"] <= latency["p99"]
    by_steps = {shape["num_steps"]: shape["accept_length"] for shape in results["grid"]}
    assert by_steps[2] <= by_steps[3] <= by_steps[5]  # a longer chain accepts what the shorter one does
    outputs = results["outputs"]
    assert outputs["identical"] == outputs["checked"] > 1000
    gains = [load for place, load in enumerate(LOADS) if any(s["timing"][place]["speedup_min"] > 1 for s in results["grid"])]
    after = [load for load in LOADS if load > max(gains, default=0)]
    assert results["break_even_concurrency"] == (after[0] if after else None)
    assert [item["concurrency"] for item in results["best"]] == LOADS
    assert results["sampling"]["holds"]
    assert results["sampling"]["found_share"] <= 0.5
