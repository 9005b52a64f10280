"""A deployment on a host that does as told: in service, or back to the target alone with the reason on record."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.errors import ArtifactError, ServerError
from eyas.manifest import load_manifest
from eyas.operate.deploy import deploy
from eyas.operate.hosts import Draft
from eyas.sglang.identity import FINGERPRINT_NAME
from eyas.speculate.benchmark import benchmark
from eyas.target.config import TargetConfig
from eyas.workspace import RunFolder
from tests.speculate.conftest import VOCAB, FakeEngine, model, served
from tests.speculate.fitted_run import keep_fingerprint
from tests.speculate.test_benchmark import Stage, run, write_export_manifests
from tests.speculate.test_embedded import save_target

__all__ = ["model", "run"]  # fixtures


@pytest.fixture(scope="module")
def target_folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(model, tmp_path_factory.mktemp("target")).folder


class Host:
    """Remembers the modes; its servers are the stage's."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.urls, self.modes = urls, list[str]()
        self.fails: str | None = None

    def enter(self, mode: str, *, draft: Draft | None = None, alone: bool = False) -> list[str]:
        self.modes.append(f"{mode} alone" if alone else f"{mode} {draft.shape if draft else ''}")
        if self.fails == mode:
            raise ServerError(f"mode {mode} never came up")
        return [self.urls[mode]]


class Scene(Stage):
    host: Host

    def deploy(self) -> Any:
        return deploy(self.run, self.config, self.host, say=lambda _: None)  # type: ignore[arg-type]

    @property
    def record(self) -> Any:
        return json.loads((self.run.benchmark / "deployment.json").read_text())


@pytest.fixture
def scene(model: Any, run: RunFolder, target_folder: Path) -> Iterator[Scene]:
    """A benchmark whose draft, which accepts nothing, is allowed by a floor of 1."""
    off, on = FakeEngine(model), FakeEngine(model, accepted=0)
    off.info = on.info = {"model_path": str(target_folder)}
    with served(off) as off_url, served(on) as on_url:
        scene = Scene(run, target_folder, [off_url, on_url], [off, on])
        scene.on.info |= {"model_path": str(target_folder)}
        scene.config = scene.config.model_copy(
            update={"benchmark": scene.config.benchmark.model_copy(update={"accept_floor": 1.0, "prediction_tolerance": 0.2})}
        )
        scene.host = Host({"draft": on_url, "generate": off_url})
        keep_fingerprint(scene.run, scene.config, off_url)
        benchmark(scene.run, scene.config)
        yield scene


def test_a_draft_that_passes_stays_in_service(scene: Scene) -> None:
    assert scene.deploy().serves_draft
    assert scene.host.modes == ["draft K=3"]
    assert scene.record["outcome"] == "serving with the draft"


def test_a_wrong_canary_reply_rolls_back_to_the_target_alone(scene: Scene) -> None:
    scene.on.change = lambda ids: [*ids[:3], *((token + 1) % VOCAB for token in ids[3:4]), *ids[4:]]
    assert not scene.deploy().serves_draft
    assert scene.host.modes == ["draft K=3", "generate alone"]
    assert "canary replies: 5 of 5 wrong" in scene.record["reason"]
    assert scene.record["outcome"].startswith("rolled back")


def test_a_server_that_computes_something_else_than_at_generation_is_rolled_back(scene: Scene) -> None:
    scene.on.model = copy.deepcopy(scene.on.model)
    scene.on.model.lm_head.weight.data.mul_(2)  # the same replies from other probabilities
    assert not scene.deploy().serves_draft
    assert scene.host.modes == ["draft K=3", "generate alone"]
    assert [check["name"] for check in scene.record["checks"] if not check["holds"]] == ["target"]
    assert "target: prompt 0 token 0: log-probabilities" in scene.record["reason"]


def test_without_the_fingerprint_of_generation_nothing_is_switched(scene: Scene) -> None:
    path = scene.run.root / FINGERPRINT_NAME
    for content in ("{}", None):
        path.write_text(content) if content else path.unlink()
        with pytest.raises(ArtifactError, match=FINGERPRINT_NAME):
            scene.deploy()
    assert scene.host.modes == []


def test_servers_that_never_come_up_with_the_draft_are_rolled_back(scene: Scene) -> None:
    scene.host.fails = "draft"
    assert "never came up" in scene.deploy().reason
    assert scene.host.modes[-1] == "generate alone"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_a_deployment_that_is_interrupted_leaves_no_unproven_draft_in_service(
    scene: Scene, interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.deploy().serves_draft
    seen: list[str] = []

    def interrupted(*_: object, **__: object) -> Any:
        seen.append(scene.record["outcome"])
        raise interruption

    monkeypatch.setattr("eyas.operate.deploy.canary", interrupted)
    with pytest.raises(interruption):
        scene.deploy()
    assert seen == ["being proven"], "the word of the deployment before stood while another was proven"
    assert scene.host.modes[-1] == "generate alone"
    assert scene.record["outcome"].startswith("rolled back")
    assert "interrupted" in scene.record["reason"]


def test_a_way_back_that_fails_is_told_and_the_reason_stands(scene: Scene) -> None:
    scene.on.info["speculative_num_steps"] = 5
    scene.host.fails = "generate"
    with pytest.raises(ServerError, match="mode generate"):
        scene.deploy()
    assert scene.record["outcome"] == "going back"
    assert "speculative_num_steps: 5, wanted 3" in scene.record["reason"]


def test_a_refused_benchmark_switches_nothing(scene: Scene) -> None:
    scene.on.accepted = 2  # no replay says so
    scene.config = scene.config.model_copy(update={"benchmark": scene.config.benchmark.model_copy(update={"timed_prompts": 1})})
    benchmark(scene.run, scene.config)
    assert not scene.deploy().serves_draft
    assert scene.host.modes == []
    assert scene.record["outcome"] == "nothing was switched"


def test_an_export_changed_since_the_benchmark_is_refused(scene: Scene, target_folder: Path) -> None:
    tensors = load_file(scene.run.export / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"] * 2}, scene.run.export / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"model\.safetensors differs from the digest in its manifest"):
        scene.deploy()
    write_export_manifests(scene.run, target_folder)  # exported again: whole, and still not what was measured
    with pytest.raises(ArtifactError, match=r"draft/export/model\.safetensors is not what the benchmark"):
        scene.deploy()
    assert scene.host.modes == []


def test_a_draft_of_another_target_is_refused(scene: Scene, model: Any, tmp_path: Path) -> None:
    """Same sizes, other weights: nothing in the files of the draft tells."""
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    scene.config = scene.config.model_copy(update={"target": TargetConfig(model=str(tmp_path / "other"))})
    with pytest.raises(ArtifactError, match=r"is a draft of target .* serve the target of the training"):
        scene.deploy()
    trained = load_manifest(scene.run.draft)
    trained.model_copy(update={"fingerprint": "1" * 64}).write(scene.run.draft)
    with pytest.raises(ArtifactError, match="was not exported from the training"):
        scene.deploy()
    assert scene.host.modes == []


def test_a_damaged_benchmark_is_refused(scene: Scene) -> None:
    (scene.run.benchmark / "results.json").write_text("{}")
    with pytest.raises(ArtifactError):
        scene.deploy()
    assert scene.host.modes == []
