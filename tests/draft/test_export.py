"""The exported folder: exact names, shapes and keys for both engines, and a loader that is strict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.draft.checkpoint import load_checkpoint, named_checkpoint
from eyas.draft.export import export_draft, load_export
from eyas.draft.train import train
from eyas.errors import ArtifactError
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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", None, "fc.weight is missing"),
        ("norm.weight", torch.ones(H + 1), r"norm.weight is \[33\], wanted \[32\]"),
        ("norm.weight", torch.full((H,), float("nan")), "norm.weight is not finite"),
        ("fc.weight", torch.zeros(H, 3 * H), "fc.weight is all zero"),
        ("embed_tokens.weight", torch.ones(V, H), "embed_tokens.weight is not expected"),
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
    assert "accept length" in card
    assert "6 replies" in card
