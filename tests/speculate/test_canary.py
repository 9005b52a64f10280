"""The canary against the embedded engine: what a right deployment shows, and what a wrong one."""

from __future__ import annotations

import asyncio
import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.engine.process import EngineProcess
from eyas.sglang.client import SGLangClient
from eyas.sglang.identity import TargetFingerprint, take_fingerprint
from eyas.speculate.canary import canary
from eyas.speculate.deploy import Check, decide
from eyas.speculate.layers import layer_check
from eyas.speculate.loops import loop_free_tokens
from eyas.speculate.predict import Predictor
from eyas.speculate.results import Row
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
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

        self.at_generation = self.fingerprint(self.config)

    def fingerprint(self, config: RunConfig) -> TargetFingerprint:
        """What generation keeps of an engine without a draft."""
        renderer = Renderer(self.spec, load_tokenizer(self.spec), config.target)

        async def take(url: str) -> TargetFingerprint:
            async with SGLangClient(url, config.server) as client:
                return await take_fingerprint(client, renderer)

        with EngineProcess(self.spec.folder, config=config.server.engine) as process:
            return asyncio.run(take(process.url))

    def canary(self, url: str, served: Path, config: RunConfig | None = None) -> dict[str, Check]:
        found = canary(url, self.rows, config or self.config, self.spec, served, at_generation=self.at_generation)
        return {check.name: check for check in found}

    def checks(self, served: Path, config: RunConfig | None = None, target: Path | None = None) -> dict[str, Check]:
        """What the canary says of an engine that serves `target` with the draft in `served`."""
        engine = (config or self.config).server.engine
        with EngineProcess(target or self.spec.folder, config=engine, draft_dir=served, num_draft_tokens=K) as process:
            return self.canary(process.url, served, config)


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
    assert {"target", "canary replies", "accept length", "prediction", "layers", "speculative_num_steps"} <= set(checks)


def test_a_target_of_the_same_replies_and_other_probabilities_is_seen(deployed: Deployed, lively: Any, tmp_path: Path) -> None:
    """As a head that was quantised or scaled: nothing at temperature 0 tells it from the target of the generation."""
    other = copy.deepcopy(lively)
    other.lm_head.weight.data.mul_(1.5)
    shutil.copytree(deployed.spec.folder, tmp_path / "target")
    other.save_pretrained(tmp_path / "target")
    checks = deployed.checks(deployed.export, target=tmp_path / "target")
    assert [check.name for check in checks.values() if not check.holds] == ["target"]
    assert "log-probabilities" in checks["target"].seen


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
    assert checks["target"].holds
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
        checks = deployed.canary(process.url, served)
    assert checks["canary replies"].holds
    assert not checks["accept length"].holds
    assert not checks["prediction"].holds
    decision = decide(list(checks.values()))
    assert not decision.serves_draft
    assert "prediction: served 1." in decision.reason


def test_server_with_another_draft_gets_no_prompt(deployed: Deployed, tmp_path: Path) -> None:
    engine = deployed.config.server.engine
    with EngineProcess(deployed.spec.folder, config=engine, draft_dir=deployed.export, num_draft_tokens=K) as process:
        checks = deployed.canary(process.url, tmp_path / "another")
    assert [check.name for check in checks.values() if not check.holds] == ["speculative_draft_model_path"]
    assert not {"target", "canary replies"} & set(checks)
