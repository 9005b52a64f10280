"""The canary against the embedded engine: what a right deployment shows, and what a wrong one."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.engine.process import EngineProcess
from eyas.speculate.canary import canary
from eyas.speculate.deploy import Check, decide
from eyas.speculate.layers import layer_check
from eyas.speculate.loops import loop_free_tokens
from eyas.speculate.predict import Predictor
from eyas.speculate.results import Row
from eyas.target.spec import TargetSpec
from tests.speculate.conftest import greedy
from tests.speculate.test_embedded import CAP, PROMPTS, K, fit_draft, save_target


class Deployed:
    """A target with a fitted draft, and the benchmark's rows of it."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.export = folder / "export"
        for part in (folder / "target", self.export):
            part.mkdir()
        self.spec: TargetSpec = save_target(model, folder / "target")
        fit_draft(model, self.spec, self.export)
        settings = {"num_draft_tokens": K, "max_new_tokens": CAP, "counting_concurrency": 4}
        engine = {"dtype": "float32", "threads": 1}
        self.config = RunConfig.model_validate(
            {"target": {"model": str(folder / "target")}, "server": {"engine": engine}, "benchmark": settings}
        )
        replies = [greedy(model, prompt.input_ids, CAP, [2]) for prompt in PROMPTS]
        free = [loop_free_tokens(reply) for reply in replies]
        predicted = Predictor(self.export, self.spec, model, K).counts(
            [(prompt.input_ids, reply[:cap]) for prompt, reply, cap in zip(PROMPTS, replies, free, strict=True)]
        )
        self.rows = [
            Row(
                id=prompt.id, dataset="b1", prompt_ids=prompt.input_ids, reference_ids=reply, loop_free_tokens=cap,
                draft_ids=reply, outcome="identical", verifications=1, accepted=0, predicted=(count.verifications, count.accepted),
            )
            for prompt, reply, cap, count in zip(PROMPTS, replies, free, predicted, strict=True)
        ]  # fmt: skip

    def checks(self, served: Path, config: RunConfig | None = None) -> dict[str, Check]:
        """What the canary says of an engine that serves the draft in `served`."""
        config = config or self.config
        with EngineProcess(self.spec.folder, config=config.server.engine, draft_dir=served, num_draft_tokens=K) as process:
            found = canary(process.url, self.rows, config, self.spec, served)
        return {check.name: check for check in found}


@pytest.fixture(scope="module")
def lively(model: Any) -> Any:
    """A target whose blocks change the states: at its first weights each adds next to nothing, and all layers look alike."""
    other = copy.deepcopy(model)
    for block in other.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.data.mul_(40)
    return other


@pytest.fixture(scope="module")
def deployed(lively: Any, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    return Deployed(lively, tmp_path_factory.mktemp("deployed"))


def test_every_check_of_a_right_deployment_holds(deployed: Deployed) -> None:
    checks = deployed.checks(deployed.export)
    assert [check for check in checks.values() if not check.holds] == []
    assert {"canary replies", "accept length", "prediction", "layers", "speculative_num_steps"} <= set(checks)


def test_shifted_layer_ids_are_seen_in_the_counts(deployed: Deployed, lively: Any) -> None:
    """https://github.com/vllm-project/vllm/pull/50170: every reply right, another layer read.

    The embedded engine refuses such a draft, so the counts of an engine that does not are those of a shifted replay.
    """
    pairs = [(row.prompt_ids, row.reference_ids[: row.loop_free_tokens]) for row in deployed.rows]
    predictors = {shift: Predictor(deployed.export, deployed.spec, lively, K, shift=shift) for shift in (0, -1, 1)}
    possible = {shift: [predictor.possible(*pair) for pair in pairs] for shift, predictor in predictors.items()}
    assert layer_check(predictors[0].counts(pairs), possible).holds
    for shift in (-1, 1):
        check = layer_check(predictors[shift].counts(pairs), possible)
        assert not check.holds
        assert f"{shift:+d}: 0" in check.seen


def test_ties_of_bf16_are_no_alarm(deployed: Deployed) -> None:
    """Served in bf16 by kernels that sum in another order than the replay does. (That shifted layers are still seen in bf16
    takes a real target: tests/engines/test_layer_probe.py.)
    """
    benchmark = deployed.config.benchmark.model_copy(update={"dtype": "bfloat16"})
    engine = deployed.config.server.engine.model_copy(update={"dtype": "bfloat16"})
    server = deployed.config.server.model_copy(update={"engine": engine})
    config = deployed.config.model_copy(update={"benchmark": benchmark, "server": server})
    checks = deployed.checks(deployed.export, config)
    assert checks["layers"].holds
    assert "+0: 0" in checks["layers"].seen


def test_a_server_that_holds_other_weights_under_the_right_path_is_seen(deployed: Deployed, tmp_path: Path) -> None:
    """Loaded before the export was finished, or from a stale copy: every reply right, every flag right, and far fewer accepted."""
    served = tmp_path / "export"
    shutil.copytree(deployed.export, served)
    tensors = load_file(served / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(7, 0)}, served / "model.safetensors")
    engine = deployed.config.server.engine
    with EngineProcess(deployed.spec.folder, config=engine, draft_dir=served, num_draft_tokens=K) as process:
        shutil.copy(deployed.export / "model.safetensors", served)
        checks = {check.name: check for check in canary(process.url, deployed.rows, deployed.config, deployed.spec, served)}
    assert checks["canary replies"].holds
    assert not checks["accept length"].holds
    assert not checks["prediction"].holds
    decision = decide(list(checks.values()))
    assert not decision.serves_draft
    assert "prediction: served 1." in decision.reason


def test_server_with_another_draft_gets_no_prompt(deployed: Deployed, tmp_path: Path) -> None:
    engine = deployed.config.server.engine
    with EngineProcess(deployed.spec.folder, config=engine, draft_dir=deployed.export, num_draft_tokens=K) as process:
        found = canary(process.url, deployed.rows, deployed.config, deployed.spec, tmp_path / "another")
    assert [check.name for check in found if not check.holds] == ["speculative_draft_model_path"]
    assert "canary replies" not in {check.name for check in found}
