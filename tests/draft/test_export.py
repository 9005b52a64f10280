"""The exported folder: exact names, shapes and keys for both engines, and a loader that is strict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.draft.checkpoint import load_checkpoint, named_checkpoint, save_checkpoint
from eyas.draft.export import export_draft, load_export
from eyas.draft.train import train
from eyas.errors import ArtifactError
from eyas.manifest import Counts, Manifest, load_manifest
from eyas.workspace import RunFolder
from tests.draft.runs import D, H, V, learnable_records, run_config, write_run, write_target

KEPT = sorted({*range(40), 50, 57, 63, 71, 80, 88, 94, 95})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunConfig]:
    root = tmp_path_factory.mktemp("export")
    target = write_target(root / "target")
    run = write_run(root / "run", target, learnable_records(6), learnable_records(2, 1), kept_ids=KEPT)
    config = run_config(target, max_steps=10)
    train(run, config)
    export_draft(run, config)
    return run, config


@pytest.fixture
def exported(trained: tuple[RunFolder, RunConfig], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((trained[0].export / name).read_bytes())
    return tmp_path


def test_names_shapes_and_types_are_the_contract(trained: tuple[RunFolder, RunConfig]) -> None:
    tensors = load_file(trained[0].export / "model.safetensors")
    layer = "midlayer."
    assert {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()} == {
        "fc.weight": ((H, 3 * H), torch.bfloat16),
        layer + "input_layernorm.weight": ((H,), torch.bfloat16),
        layer + "hidden_norm.weight": ((H,), torch.bfloat16),
        layer + "post_attention_layernorm.weight": ((H,), torch.bfloat16),
        layer + "self_attn.q_proj.weight": ((32, 2 * H), torch.bfloat16),
        layer + "self_attn.k_proj.weight": ((16, 2 * H), torch.bfloat16),
        layer + "self_attn.v_proj.weight": ((16, 2 * H), torch.bfloat16),
        layer + "self_attn.o_proj.weight": ((H, 32), torch.bfloat16),
        layer + "mlp.gate_proj.weight": ((48, H), torch.bfloat16),
        layer + "mlp.up_proj.weight": ((48, H), torch.bfloat16),
        layer + "mlp.down_proj.weight": ((H, 48), torch.bfloat16),
        "norm.weight": ((H,), torch.bfloat16),
        "lm_head.weight": ((D, H), torch.bfloat16),
        "d2t": ((D,), torch.int64),
        "t2d": ((V,), torch.bool),
    }


def test_embeddings_are_absent_by_intent(trained: tuple[RunFolder, RunConfig]) -> None:
    """https://github.com/lightseekorg/TorchSpec/issues/38: random embeddings were exported; both engines take the target's."""
    assert not [name for name in load_file(trained[0].export / "model.safetensors") if "embed" in name]


def test_the_tensors_are_the_best_checkpoint(trained: tuple[RunFolder, RunConfig]) -> None:
    best = load_checkpoint(named_checkpoint(trained[0].draft / "checkpoints", "best"))
    tensors = load_export(trained[0].export)[1]
    for name, master in best.masters.items():
        assert torch.equal(tensors[name], master.bfloat16())


def test_one_config_serves_both_engines_each_in_its_own_convention(trained: tuple[RunFolder, RunConfig]) -> None:
    """Keys left out were guessed: https://github.com/vllm-project/vllm/pull/50170, https://github.com/vllm-project/vllm/pull/38111."""
    config = json.loads((trained[0].export / "config.json").read_bytes())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # outputs of blocks, n = 8: 1, n//2 - 1, n - 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # inputs to layers: 2, n//2, n - 3
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == D
    assert config["vocab_size"] == V
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[key] is False
    assert {"hidden_size", "target_hidden_size", "head_dim", "num_aux_hidden_states", "attention_bias"} <= set(config)


def test_the_map_round_trips_as_offsets(trained: tuple[RunFolder, RunConfig]) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2447, https://github.com/verl-project/verl-SpeCo/pull/67."""
    tensors = load_export(trained[0].export)[1]
    assert (torch.arange(D) + tensors["d2t"]).tolist() == KEPT
    assert tensors["t2d"].nonzero()[:, 0].tolist() == KEPT


def test_offsets_of_ten_tokens_that_keep_2_5_9() -> None:
    from eyas.draft.corpus import check_map

    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[2, 5, 9]] = True
    check_map(torch.tensor([2, 4, 7]), t2d, "test")
    with pytest.raises(ArtifactError, match="offsets"):
        check_map(torch.tensor([2, 5, 9]), t2d, "test")


def test_the_loaded_spec_is_what_was_exported(trained: tuple[RunFolder, RunConfig]) -> None:
    spec, tensors = load_export(trained[0].export)
    assert spec.aux_blocks == (1, 3, 4)
    assert set(tensors) == {*spec.tensor_shapes, "d2t", "t2d"}
    assert json.loads(json.dumps(spec.engine_config("bfloat16"))) == json.loads((trained[0].export / "config.json").read_bytes())


SPOILT: list[tuple[str, torch.Tensor | None, str]] = [
    ("fc.weight", None, "fc.weight is missing"),
    ("midlayer.self_attn.q_proj.weight", None, "midlayer.self_attn.q_proj.weight is missing"),
    ("embed_tokens.weight", torch.ones(V, H), "embed_tokens.weight is not expected"),
    ("norm.weight", torch.ones(H + 1), r"norm.weight is \[33\], wanted \[32\]"),
    ("lm_head.weight", torch.ones(V, H), r"lm_head.weight is \[96, 32\], wanted \[48, 32\]"),
    ("norm.weight", torch.full((H,), float("nan")), "norm.weight is not finite"),
    ("midlayer.mlp.up_proj.weight", torch.full((48, H), float("inf")), "midlayer.mlp.up_proj.weight is not finite"),
    ("fc.weight", torch.zeros(H, 3 * H), "fc.weight is all zero"),
    ("fc.weight", torch.ones(H, 3 * H, dtype=torch.int8), "fc.weight is torch.int8, wanted torch.float32"),
    ("norm.weight", torch.ones(H, dtype=torch.float64), "norm.weight is torch.float64, wanted torch.float32"),
]


@pytest.mark.parametrize(("name", "change", "message"), SPOILT)
def test_a_spoilt_checkpoint_is_not_exported(
    trained: tuple[RunFolder, RunConfig], tmp_path: Path, name: str, change: torch.Tensor | None, message: str
) -> None:
    """A whole checkpoint, its digests right, whose tensors are not this draft's: nothing is written, each fault named."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(trained[0].root, run.root)
    shutil.rmtree(run.export)
    checkpoints = run.draft / "checkpoints"
    best = load_checkpoint(named_checkpoint(checkpoints, "best"))
    masters = {key: value for key, value in {**best.masters, name: change}.items() if value is not None}
    save_checkpoint(checkpoints, best.state, masters, best.optimizer, is_best=True, keep=9)
    with pytest.raises(ArtifactError, match=message):
        export_draft(run, trained[1])
    assert not run.export.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": torch.tensor(KEPT)}, "d2t must hold offsets"),
        ({"d2t": (torch.tensor(KEPT) - torch.arange(D)).int()}, r"d2t is torch.int32 .* wanted int64"),
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "ascending list of ids that t2d keeps"),
        ({"t2d": None}, "t2d"),
    ],
)
def test_a_draft_is_not_exported_under_a_map_that_engines_would_read_otherwise(
    trained: tuple[RunFolder, RunConfig], tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2447, https://github.com/verl-project/verl-SpeCo/pull/67."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(trained[0].root, run.root)
    shutil.rmtree(run.export)
    path = run.merged / "vocab_map.safetensors"
    save_file({key: value for key, value in {**load_file(path), **changes}.items() if value is not None}, path)
    with pytest.raises(ArtifactError, match=message):
        export_draft(run, trained[1])
    assert not run.export.exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", None, "fc.weight is missing"),
        ("norm.weight", torch.ones(H + 1), r"norm.weight is \[33\], wanted \[32\]"),
        ("norm.weight", torch.full((H,), float("nan")).bfloat16(), "norm.weight is not finite"),
        ("fc.weight", torch.zeros(H, 3 * H).bfloat16(), "fc.weight is all zero"),
        ("embed_tokens.weight", torch.ones(V, H), "embed_tokens.weight is not expected"),
        ("norm.weight", torch.ones(H), "norm.weight is torch.float32, wanted torch.bfloat16"),
        ("d2t", torch.arange(D), "offsets"),
        ("t2d", None, "t2d is missing"),
    ],
)
def test_a_spoilt_tensor_is_refused_by_name(exported: Path, name: str, change: torch.Tensor | None, message: str) -> None:
    tensors = load_file(exported / "model.safetensors")
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(ArtifactError, match=message):
        load_export(exported)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eagle_aux_hidden_state_layer_ids", None, "eagle_aux_hidden_state_layer_ids is null"),
        ("eagle_aux_hidden_state_layer_ids", [1, 3, 4], "wanted .2, 4, 5."),
        ("draft_vocab_size", None, "draft_vocab_size"),
        ("surprise", 1, "surprise is not expected"),
        ("dtype", "float16", "dtype is 'float16', wanted 'bfloat16' or 'float32'"),
        ("tie_word_embeddings", True, "tie_word_embeddings is true, wanted false"),
    ],
)
def test_a_config_key_that_is_missing_or_wrong_is_refused(exported: Path, key: str, value: object, message: str) -> None:
    """https://github.com/vllm-project/vllm/pull/50170: without the layer ids the engine guesses and accepts nothing."""
    config = json.loads((exported / "config.json").read_bytes())
    if value is None:
        del config[key]
    else:
        config[key] = value
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=message):
        load_export(exported)


def test_files_that_are_not_a_draft_are_refused(exported: Path) -> None:
    (exported / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ArtifactError, match="not safetensors"):
        load_export(exported)
    (exported / "config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="wanted an object"):
        load_export(exported)


def test_the_manifest_and_the_card_say_what_it_is(trained: tuple[RunFolder, RunConfig]) -> None:
    run, config = trained
    before = (run.export / "manifest.json").read_bytes()
    manifest = export_draft(run, config)
    assert (run.export / "manifest.json").read_bytes() == before
    assert {entry.path for entry in manifest.files} == {"config.json", "model.safetensors", "README.md"}
    card = (run.export / "README.md").read_text()
    assert "6 replies of the target" in card
    replays = [json.loads(line) for line in (run.draft / "metrics.jsonl").read_text().splitlines()]
    (best,) = [row for row in replays if row["kind"] == "heldout" and row["step"] == manifest.figures["step"]]
    assert f"**{best['accept_length']:.3f}** ({best['accepted']} accepted in {best['verifications']} verifications)" in card
    assert f"| a | {best['per_dataset']['a']['accept_length']:.3f} | {best['per_dataset']['a']['verifications']} |" in card


def test_the_card_states_data_with_licences_and_the_targets_own(trained: tuple[RunFolder, RunConfig], tmp_path: Path) -> None:
    """A licence that the config leaves out is the source's own, as phase 1 wrote it down."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(trained[0].root, run.root)
    target = shutil.copytree(trained[1].target.model, tmp_path / "target")
    (target / "README.md").write_text("---\nlicense: other\nlicense_name: modified-mit\n---\n# A model\n")
    datasets = [{"name": "a", "source": "package:mt-bench"}, {"name": "b", "source": "hub:x/y", "license": "CC-BY-4.0"}]
    config = RunConfig.model_validate(
        {**trained[1].model_dump(), "prompts": {"datasets": datasets}, "target": {"model": str(target)}}
    )
    run.prompts("a").mkdir(parents=True)
    common = {"stage": "prepare", "stage_version": 1, "fingerprint": "0" * 64, "counts": Counts.of(done=6)}
    Manifest(**common, figures={"license": "Apache-2.0"}).write(run.prompts("a"))
    merged = load_manifest(run.merged)
    figures = {"per_dataset": {"a": {"train": {"records": 6, "tokens": 1440}}}, "coverage": {"train": 0.987}}
    merged.model_copy(update={"figures": figures}).write(run.merged)
    export_draft(run, config)
    card = (run.export / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "other"
    assert "| a | `package:mt-bench` | Apache-2.0 | 6 | 1,440 |" in card
    assert "| b | `hub:x/y` | CC-BY-4.0 | – | – |" in card
    assert "the target's licence (modified-mit)" in card
    assert "98.7% of the train tokens" in card
    assert "--speculative-num-draft-tokens 4" in card
