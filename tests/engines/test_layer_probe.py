"""The probe of a deployment's layers on a real target and a trained draft, in the precision in which ties abound."""

from __future__ import annotations

import pytest

from eyas.files import read_json
from eyas.speculate.layers import layer_check
from eyas.speculate.lossless import load_judge
from eyas.speculate.predict import Predictor
from eyas.speculate.results import SetMeasurement
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder

pytestmark = pytest.mark.engines

K = 3


def test_bf16_gives_no_false_alarm_and_hides_no_shifted_layer(finished_run: RunFolder, target: TargetSpec) -> None:
    """The served counts are the benchmark's own; those of a wrong engine are the replay's on shifted layers."""
    (path,) = finished_run.benchmark.glob("raw-heldout-*.json")
    rows = [row for row in SetMeasurement.model_validate(read_json(path)).rows if row.outcome == "identical"][:8]
    pairs = [(row.prompt_ids, row.reference_ids[: row.loop_free_tokens]) for row in rows]
    model = load_judge(target, "bfloat16")
    predictors = {shift: Predictor(finished_run.export, target, model, K, shift=shift) for shift in (0, -1, 1)}
    possible = {shift: [predictor.possible(*pair) for pair in pairs] for shift, predictor in predictors.items()}
    served = layer_check([row.counts for row in rows], possible)
    assert served.holds
    assert "+0: 0" in served.seen
    for shift in (-1, 1):
        assert not layer_check(predictors[shift].counts(pairs), possible).holds
