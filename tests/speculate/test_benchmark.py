"""The whole of phase 6 on a tiny run folder, against loopback servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from eyas.config import RunConfig
from eyas.draft.config import DraftConfig
from eyas.draft.spec import DraftSpec
from eyas.errors import ArtifactError, ConfigError
from eyas.files import digest_file
from eyas.manifest import Counts, Manifest, file_entries, verify_manifest
from eyas.progress import Progress
from eyas.speculate import benchmark as benchmark_module
from eyas.speculate.benchmark import benchmark
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from eyas.workspace import RunFolder
from tests.speculate.conftest import VOCAB, FakeEngine, served
from tests.speculate.test_embedded import save_target

DATASETS = ("b1", "b2")


@pytest.fixture(scope="module")
def target_folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder


def write_draft(run: RunFolder, target_folder: Path) -> None:
    spec = DraftSpec.from_target(load_target(TargetConfig(model=str(target_folder))), DraftConfig(), VOCAB // 2)
    torch.manual_seed(1)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in spec.tensor_shapes.items()}
    tensors["d2t"], tensors["t2d"] = torch.zeros(VOCAB // 2, dtype=torch.int64), torch.arange(VOCAB) < VOCAB // 2
    run.export.mkdir(parents=True)
    (run.export / "config.json").write_text(json.dumps(spec.engine_config("float32")))
    save_file(tensors, run.export / "model.safetensors")
    write_export_manifests(run, target_folder)


def write_export_manifests(run: RunFolder, target_folder: Path) -> None:
    """What training and export leave beside a draft for the target in `target_folder`."""
    target = load_target(TargetConfig(model=str(target_folder))).fingerprint
    common: dict[str, Any] = {"stage_version": 1, "fingerprint": "0" * 64, "counts": Counts.of(done=1)}
    trained = Manifest(stage="train", config={"target": target}, **common).write(run.draft)
    files = file_entries(run.export, ["config.json", "model.safetensors"])
    Manifest(stage="export", inputs={"train": trained.digest()}, files=files, **common).write(run.export)


def write_manifest(folder: Path, stage: str) -> None:
    table = next(folder.glob("*.parquet"))
    figures = {"length_quantiles": {"p100": 12}} if stage == "merge" else {}
    Manifest(stage=stage, stage_version=1, fingerprint=digest_file(table), counts=Counts.of(done=1), figures=figures).write(folder)


@pytest.fixture
def run(target_folder: Path, tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run").create()
    for number, name in enumerate(DATASETS):
        rows = [
            {"id": f"{number}{row}", "split": "heldout" if row % 2 else "train", "input_ids": [3 + 9 * row + number, 4, 5 + row]}
            for row in range(8)
        ]
        run.prompts(name).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), run.prompts(name) / "prompts.parquet")
        write_manifest(run.prompts(name), "prompts")
    run.merged.mkdir()
    record = {"id": "00", "split": "train", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    pq.write_table(pa.Table.from_pylist([record]), run.merged / "tokens.parquet")
    write_manifest(run.merged, "merge")
    write_draft(run, target_folder)
    return run


class Stage:
    """Two loopback servers and a config that names them."""

    def __init__(self, run: RunFolder, target_folder: Path, urls: list[str], engines: list[FakeEngine]) -> None:
        self.run, (self.off, self.on) = run, engines
        datasets = [{"name": name, "source": "file:unused"} for name in DATASETS]
        settings = {"prompts_per_set": 5, "max_new_tokens": 12, "timed_prompts": 2, "sets": ["heldout"], "draft_urls": [urls[1]]}
        settings["counting_concurrency"] = 8
        self.config = RunConfig.model_validate(
            {
                "target": {"model": str(target_folder)},
                "prompts": {"datasets": datasets},
                "server": {"kind": "sglang", "urls": [urls[0]]},
                "benchmark": settings,
            }
        )
        self.on.info = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(run.export),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        }

    @property
    def results(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.run.benchmark / "results.json").read_text())
        return value


@pytest.fixture
def stage(model: Any, run: RunFolder, target_folder: Path) -> Iterator[Stage]:
    off, on = FakeEngine(model), FakeEngine(model, accepted=1)
    with served(off) as off_url, served(on) as on_url:
        yield Stage(run, target_folder, [off_url, on_url], [off, on])


def test_results_hold_the_fixed_interface_and_the_manifest_verifies(stage: Stage) -> None:
    manifest = benchmark(stage.run, stage.config)
    assert verify_manifest(stage.run.benchmark) == manifest
    assert (manifest.counts.done, manifest.counts.pending) == (5, 0)
    results = stage.results
    assert results["accept_length"]["overall"] == pytest.approx(2.0)
    assert results["accept_length"]["per_dataset"] == {"b1": pytest.approx(2.0), "b2": pytest.approx(2.0)}
    assert results["outputs"] == {"checked": 9, "identical": 9, "tie": 0, "wrong": 0}
    assert results["engine"] == "sglang"
    assert results["speedup"] > 0
    assert 1.0 <= results["predicted_accept_length"] <= 4.0
    assert set(results["baselines"]) == {"bigram", "prompt_lookup"}
    assert "Accept length 2.000" in (stage.run.benchmark / "report.md").read_text()
    assert "--speculative-num-draft-tokens 4" in (stage.run.benchmark / "launch.sh").read_text()


def test_only_heldout_prompts_are_sent_dealt_from_the_datasets_in_turn(stage: Stage) -> None:
    benchmark(stage.run, stage.config)
    rows = [row["id"] for row in json.loads(next(stage.run.benchmark.glob("raw-heldout-*.json")).read_text())["rows"]]
    assert rows == ["01", "11", "03", "13", "05"]


def test_standard_sets_run_whole_from_packages_and_files(stage: Stage, model: Any, target_folder: Path, tmp_path: Path) -> None:
    """BFCL and HumanEval from their wheels, GSM8K and MATH-500 in their published columns, and one's own traffic, too long
    for any trained record."""
    save_target(model, target_folder)  # with a tokenizer: these sets are text
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "Natalia sold 48 clips. How many altogether?", "answer": "#### 72"}\n')
    (tmp_path / "math-500.jsonl").write_text('{"problem": "Convert $(0,3)$.", "solution": "s", "answer": "3", "level": 2}\n')
    (tmp_path / "own.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    sets = [
        "package:bfcl/simple_python",
        "package:humaneval",
        *(f"file:{tmp_path / name}.jsonl" for name in ("gsm8k", "math-500", "own")),
    ]
    stage.config = stage.config.model_copy(
        update={"benchmark": stage.config.benchmark.model_copy(update={"sets": sets, "prompts_per_set": 2, "timed_prompts": 1})}
    )
    manifest = benchmark(stage.run, stage.config)
    results = stage.results
    assert {name: item["num_requests"] for name, item in results["per_set"].items()} == {
        "simple_python": 2, "humaneval": 2, "gsm8k": 1, "math-500": 1, "own": 2,
    }  # fmt: skip
    assert manifest.counts.done == 8
    assert results["outputs"]["wrong"] == 0
    assert set(results["timing_per_set"]) == set(results["per_set"])
    assert sum(band["num_requests"] for band in results["by_context"]) == 8


def test_finished_benchmark_sends_nothing_and_a_new_draft_is_measured_again(stage: Stage, target_folder: Path) -> None:
    first = benchmark(stage.run, stage.config)
    sent = len(stage.off.requests)
    assert benchmark(stage.run, stage.config) == first
    assert len(stage.off.requests) == sent
    export = stage.run.export / "config.json"
    export.write_text(export.read_text() + "\n")
    assert benchmark(stage.run, stage.config).fingerprint != first.fingerprint
    assert len(stage.off.requests) == 2 * sent
    assert len(list(stage.run.benchmark.glob("raw-*.json"))) == 1


def test_killed_benchmark_goes_on_with_what_is_missing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(benchmark_module, "_write_outputs", killed)
        with pytest.raises(KeyboardInterrupt):
            benchmark(stage.run, stage.config)
    assert not (stage.run.benchmark / "manifest.json").exists()
    sent = len(stage.off.requests)
    benchmark(stage.run, stage.config)
    assert len(stage.off.requests) == sent


def test_served_length_apart_from_the_replay_is_not_deployed_and_says_why(stage: Stage) -> None:
    """The random draft replays near 1 while the server claims 2: another draft, or another layer, is being served."""
    benchmark(stage.run, stage.config)
    deployment = stage.results["deployment"]
    assert not deployment["serves_draft"]
    assert "prediction: served 2.000" in deployment["reason"]


def test_server_with_another_chain_fails_the_identity_check(stage: Stage) -> None:
    stage.on.info["speculative_num_steps"] = 5
    benchmark(stage.run, stage.config)
    assert "speculative_num_steps: 5, wanted 3" in stage.results["deployment"]["reason"]


def test_wrong_replies_are_counted_and_stop_the_deployment(stage: Stage) -> None:
    stage.on.change = lambda ids: [*ids[:3], *((token + 1) % VOCAB for token in ids[3:4]), *ids[4:]]
    benchmark(stage.run, stage.config)
    assert stage.results["outputs"] == {"checked": 9, "identical": 0, "tie": 0, "wrong": 9}
    assert "9 of 9 wrong" in stage.results["deployment"]["reason"]


def test_progress_counts_every_block_to_the_end(stage: Stage) -> None:
    seen: list[Progress] = []
    benchmark(stage.run, stage.config, seen.append)
    blocks = [progress for progress in seen if progress.name == "heldout"]
    assert [progress.done for progress in blocks] == list(range(1, 7))
    assert blocks[-1].is_final
    assert {progress.total for progress in blocks} == {6}


def test_the_callers_key_goes_with_every_request(stage: Stage) -> None:
    benchmark(stage.run, stage.config, api_key="secret")
    assert {*stage.off.keys, *stage.on.keys} == {"Bearer secret"}
    assert not [path for path in stage.run.root.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_missing_draft_says_which_phase_to_run(stage: Stage) -> None:
    (stage.run.export / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match="exports the draft"):
        benchmark(stage.run, stage.config)


def test_no_server_with_the_draft_is_refused_before_anything_is_sent(stage: Stage) -> None:
    config = stage.config.model_copy(update={"benchmark": stage.config.benchmark.model_copy(update={"draft_urls": []})})
    with pytest.raises(ConfigError, match="draft_urls"):
        benchmark(stage.run, config)
    assert not stage.off.requests
    assert "--speculative-algorithm EAGLE3" in (stage.run.benchmark / "launch.sh").read_text()
