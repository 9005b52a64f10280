"""A run that starts from another's draft keeps its map and shape, and reports what was gained over it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.config import RunConfig
from eyas.draft.baseline import import_baseline
from eyas.draft.data import make_batch
from eyas.draft.export import export_draft, load_export
from eyas.draft.model import rms_norm
from eyas.draft.train import train
from eyas.errors import ConfigError
from eyas.manifest import Manifest, load_manifest
from eyas.merging.vocabulary import kept_map
from eyas.operate.pipeline import open_run
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder
from tests.draft.foreign_drafts import write_draft
from tests.draft.reference import SlowDraft
from tests.draft.runs import V, learnable_records, run_config, write_run, write_target
from tests.draft.tiny import random_draft, random_record, tiny_spec

KEPT = sorted({*range(40), 50, 57, 63, 71, 80, 88, 94, 95})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetSpec, Path]:
    """A trained draft in SpecForge's layout, with the target's embeddings, and its target."""
    root = tmp_path_factory.mktemp("first")
    folder = write_target(root / "target")
    run = write_run(root / "run", folder, learnable_records(8), learnable_records(2, 1), kept_ids=KEPT)
    config = run_config(folder, max_steps=60)
    train(run, config)
    export_draft(run, config)
    spec, tensors = load_export(run.export)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    written = {key: value for key, value in spec.engine_config("bfloat16").items() if not key.startswith("eagle_aux")}
    return write_draft(root / "theirs", written, {**tensors, "embed_tokens.weight": embed}), load_target(config.target), folder


def second_run(root: Path, target: Path, kept_ids: list[int]) -> RunFolder:
    return write_run(root, target, learnable_records(6, 2), learnable_records(3, 3), kept_ids=kept_ids)


def opened(run: RunFolder, config: RunConfig, target: TargetSpec) -> Manifest:
    manifest = import_baseline(run, config, target)
    assert manifest is not None
    return manifest


def test_warm_start_keeps_the_checkpoints_map_and_begins_where_it_ended(
    first: tuple[Path, TargetSpec, Path], tmp_path: Path
) -> None:
    """https://github.com/sgl-project/SpecForge/pull/534: rebuilt from new data, each output column means another token."""
    theirs, target, folder = first
    run = second_run(tmp_path / "run", folder, KEPT)
    config = run_config(folder, max_steps=1, learning_rate=1e-9, baseline=str(theirs), warm_start=True)
    opened(run, config, target)
    trained = train(run, config)
    export_draft(run, config)
    before, after = load_file(theirs / "model.safetensors"), load_export(run.export)[1]
    for name in ("d2t", "t2d", "lm_head.weight", "fc.weight"):
        assert torch.equal(after[name], before[name]), name
    baseline = trained.figures["baseline"]
    assert baseline["accept_length"] == trained.figures["accept_length"] > 2
    assert baseline["verifications"] > 0


def test_a_map_of_other_data_is_refused_before_training(first: tuple[Path, TargetSpec, Path], tmp_path: Path) -> None:
    """https://github.com/sgl-project/SpecForge/pull/534."""
    theirs, target, folder = first
    run = second_run(tmp_path / "run", folder, list(range(48)))
    config = run_config(folder, baseline=str(theirs), warm_start=True)
    opened(run, config, target)
    with pytest.raises(ConfigError, match="another vocabulary map"):
        train(run, config)


def test_the_merge_keeps_the_map(first: tuple[Path, TargetSpec, Path], tmp_path: Path) -> None:
    """https://github.com/sgl-project/SpecForge/pull/534."""
    theirs, target, folder = first
    run = RunFolder(tmp_path).create()
    opened(run, run_config(folder, baseline=str(theirs), warm_start=True), target)
    found = kept_map(run.baseline, target)
    assert found.kept.tolist() == KEPT
    found.write(tmp_path / "map.safetensors")
    assert torch.equal(load_file(tmp_path / "map.safetensors")["d2t"], load_file(theirs / "model.safetensors")["d2t"])
    assert found.digest() != type(found)(kept=np.arange(48), vocab_size=V, num_filled=0).digest()


def test_a_fresh_start_is_measured_against_the_baseline_too(first: tuple[Path, TargetSpec, Path], tmp_path: Path) -> None:
    theirs, target, folder = first
    run = second_run(tmp_path / "run", folder, list(range(48)))
    config = run_config(folder, max_steps=2, baseline=str(theirs))
    opened(run, config, target)
    trained = train(run, config)
    assert trained.figures["baseline"]["accept_length"] > trained.figures["accept_length"]
    assert load_manifest(run.draft).inputs["baseline"] == load_manifest(run.baseline).digest()


def test_a_baseline_that_does_not_fit_fails_when_the_run_is_opened(first: tuple[Path, TargetSpec, Path], tmp_path: Path) -> None:
    _, _, folder = first
    with pytest.raises(ConfigError, match="is no draft"):
        open_run(tmp_path / "run", run_config(folder, baseline=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"draft\.baseline is empty"):
        open_run(tmp_path / "run", run_config(folder, warm_start=True))


def test_another_shape_than_the_checkpoints_is_refused(first: tuple[Path, TargetSpec, Path], tmp_path: Path) -> None:
    theirs, target, folder = first
    run = second_run(tmp_path / "run", folder, KEPT)
    config = run_config(folder, baseline=str(theirs), warm_start=True, intermediate_size=64)
    opened(run, config, target)
    with pytest.raises(ConfigError, match="intermediate_size is 64"):
        train(run, config)


def test_notes_of_the_import_are_logged(
    first: tuple[Path, TargetSpec, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, target, folder = first
    tensors = load_file(theirs / "model.safetensors")
    ids = torch.arange(48) + tensors["d2t"]
    other = write_draft(tmp_path / "ids", {"norm_before_residual": False, **_config(theirs)}, {**tensors, "d2t": ids})
    with caplog.at_level(logging.WARNING):
        opened(RunFolder(tmp_path / "run").create(), run_config(folder, baseline=str(other)), target)
    assert "holds ids" in caplog.text


def test_the_normed_residual_is_what_a_slow_decoder_computes() -> None:
    """speculators' `norm_before_residual`, against a reference that decodes step by step, in float64."""
    spec = tiny_spec(norm_before_residual=True)
    draft = random_draft(spec)
    record = random_record(spec, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1], 1)
    batch = make_batch([record], 3)
    slow = SlowDraft(spec, dict(draft.named_parameters()), draft.embed_tokens)
    states = draft.unroll(batch, 3)
    for column, t in enumerate(batch.active.tolist()):
        for step, logits in enumerate(slow.chain(record, t, 3)):
            out = rms_norm(states[step, column], draft.norm.weight, spec.rms_norm_eps) @ draft.lm_head.weight.T
            assert torch.allclose(out, logits, atol=1e-9)


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_bytes())
