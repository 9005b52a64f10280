"""Drafts of SpecForge, TorchSpec, speculators, EAGLE and SGLang are read as the same draft, or refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.config import RunConfig
from eyas.draft.baseline import import_draft
from eyas.draft.export import load_export
from eyas.draft.foreign import ForeignDraft, read_draft
from eyas.draft.spec import DraftSpec
from eyas.errors import ArtifactError, ConfigError, EyasError
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.target.weights import load_head
from tests.draft.foreign_drafts import KEPT, as_layers, draft_tensors, llama_config, speculators_config, write_draft
from tests.draft.runs import D, H, V, write_target

EAGLE_IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
Found = tuple[TargetSpec, DraftSpec, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Found:
    target = load_target(TargetConfig(model=str(write_target(tmp_path_factory.mktemp("target")))))
    spec = DraftSpec.from_target(target, RunConfig().draft, D)
    return target, spec, draft_tensors(spec)


def read(folder: Path, known: Found) -> ForeignDraft:
    return read_draft(folder, known[0], load_head(known[0], torch.bfloat16).embed_tokens)


def assert_same(found: ForeignDraft, known: Found) -> None:
    _, spec, tensors = known
    assert found.spec == spec
    assert set(found.tensors) == set(tensors)
    for name, value in tensors.items():
        assert torch.equal(found.tensors[name], value), name


def test_specforge_with_embeddings_and_default_layers(tmp_path: Path, known: Found) -> None:
    embedding = load_head(known[0], torch.bfloat16).embed_tokens
    folder = write_draft(tmp_path, llama_config(known[1]), {**known[2], "embed_tokens.weight": embedding})
    found = read(folder, known)
    assert_same(found, known)
    assert "no eagle_aux_hidden_state_layer_ids" in " ".join(found.notes)


def test_sglang_style_with_layer_ids(tmp_path: Path, known: Found) -> None:
    found = read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), known[2]), known)
    assert_same(found, known)
    assert found.notes == ()


def test_speculators(tmp_path: Path, known: Found) -> None:
    tensors = as_layers(known[2]) | {"verifier_norm.weight": torch.ones(H)}
    found = read(write_draft(tmp_path, speculators_config(known[1], known[0]), tensors), known)
    assert_same(found, known)
    assert found.layout == "speculators"


def test_speculators_normed_residual_is_kept_and_said(tmp_path: Path, known: Found) -> None:
    config = speculators_config(known[1], known[0], norm_before_residual=True)
    found = read(write_draft(tmp_path, config, as_layers(known[2])), known)
    assert found.spec.norm_before_residual
    assert "SGLang 0.5.23 ignores" in found.notes[0]


def test_speculators_must_say_where_its_residual_is(tmp_path: Path, known: Found) -> None:
    """vLLM's default of the key is True, speculators' own is False."""
    config = speculators_config(known[1], known[0])
    del config["norm_before_residual"]
    with pytest.raises(ArtifactError, match="lacks norm_before_residual"):
        read(write_draft(tmp_path, config, as_layers(known[2])), known)


def test_torchspec_export_for_vllm_counts_layers_by_input_under_sglangs_key(tmp_path: Path, known: Found) -> None:
    """TorchSpec's tools/convert_to_hf.py adds one to `eagle_config`'s ids, which SGLang would take for outputs."""
    config = llama_config(known[1], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    found = read(write_draft(tmp_path, config, as_layers(known[2])), known)
    assert_same(found, known)
    assert "takes wrong layers" in found.notes[0]


def test_training_prefixes_shards_and_the_targets_tensors(tmp_path: Path, known: Found) -> None:
    tensors = {f"module.draft_model.{name}": value for name, value in known[2].items()}
    tensors["target_model.model.norm.weight"] = torch.ones(H)
    assert_same(read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), tensors, shards=3), known), known)


def test_vllms_own_names_inside_model(tmp_path: Path, known: Found) -> None:
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: value for name, value in as_layers(known[2]).items()}
    tensors["draft_id_to_target_id"] = tensors.pop("model.d2t")
    assert_same(read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), tensors), known), known)


def test_original_eagle_pickle_is_read_without_running_it(tmp_path: Path, known: Found) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(known[1], **EAGLE_IDS)))
    torch.save(known[2], tmp_path / "pytorch_model.bin")
    found = read(tmp_path, known)
    assert_same(found, known)
    assert "pickle" in found.notes[0]


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, known: Found) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "config.json").write_text(json.dumps(llama_config(known[1])))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArtifactError, match="was not run"):
        read(tmp_path, known)
    assert not (tmp_path / "ran").exists()


def test_ids_in_place_of_offsets_are_recognised_by_t2d(tmp_path: Path, known: Found) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2447: d2t as ids, where engines add it as offset."""
    tensors = {**known[2], "d2t": torch.tensor(KEPT, dtype=torch.int32)}
    found = read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), tensors), known)
    assert_same(found, known)
    assert "holds ids" in found.notes[0]


def test_a_map_out_of_order_is_sorted_with_its_head(tmp_path: Path, known: Found) -> None:
    order = torch.randperm(D, generator=torch.Generator().manual_seed(1))
    tensors = {
        **known[2],
        "d2t": torch.tensor(KEPT)[order] - torch.arange(D),
        "lm_head.weight": known[2]["lm_head.weight"][order],
    }
    assert_same(read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), tensors), known), known)


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path, known: Found) -> None:
    spec = DraftSpec.from_target(known[0], RunConfig().draft, V)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in spec.tensor_shapes.items()}
    found = read(write_draft(tmp_path, llama_config(spec, draft_vocab_size=None, **EAGLE_IDS), tensors), known)
    assert not found.tensors["d2t"].any()
    assert found.tensors["t2d"].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, wanted 32"),
        ({"vocab_size": 100}, "vocab_size is 100, wanted 96"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, wanted 1"),
        ({"norm_output": True}, "norm_output is set"),
        ({"fc_norm": True}, "fc_norm is set"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is set"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, r"is \[0, 3, 6\], wanted \[1, 3, 4\]"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "engines differ in which counts"),
    ],
)
def test_other_targets_and_other_kinds_are_refused_by_name(tmp_path: Path, known: Found, change: dict, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read(write_draft(tmp_path, llama_config(known[1], **change), known[2]), known)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("midlayer.mlp.up_proj.weight", None, "midlayer.mlp.up_proj.weight is missing"),
        ("midlayer.self_attn.q_norm.weight", torch.ones(8), "midlayer.self_attn.q_norm.weight is not expected"),
        ("norm.weight", torch.ones(H + 1), r"norm.weight is \[33\], wanted \[32\]"),
        ("fc.weight", torch.ones(H, 2 * H), "EAGLE-1 or -2"),
        ("norm.weight", torch.full((H,), float("nan")), "norm.weight is not finite"),
        ("lm_head.weight", torch.zeros(D, H), "lm_head.weight is all zero"),
        ("fc.weight", torch.ones(H, 3 * H).to(torch.int8), "wanted unquantised"),
        ("d2t", None, "d2t is missing"),
        ("d2t", torch.zeros(D, dtype=torch.int64), "the map belongs to another draft"),
        ("t2d", torch.ones(V, dtype=torch.bool), "its map was never filled"),
        ("embed_tokens.weight", torch.randn(V, H, generator=torch.Generator().manual_seed(9)), "saved unloaded"),
        ("module.norm.weight", torch.ones(H), "a second norm.weight"),
    ],
)
def test_tensors_that_are_not_this_draft_are_refused_by_name(
    tmp_path: Path, known: Found, name: str, value: torch.Tensor | None, message: str
) -> None:
    """Random embeddings: https://github.com/lightseekorg/TorchSpec/issues/38."""
    tensors = {key: tensor for key, tensor in {**known[2], name: value}.items() if tensor is not None}
    with pytest.raises(ArtifactError, match=message):
        read(write_draft(tmp_path, llama_config(known[1], **EAGLE_IDS), tensors), known)


def test_folders_without_a_draft_are_refused(tmp_path: Path, known: Found) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read(tmp_path, known)
    (tmp_path / "iter_1").mkdir()
    (tmp_path / "iter_1" / "__0_0.distcp").touch()
    with pytest.raises(ConfigError, match=r"convert_to_hf\.py"):
        read(tmp_path, known)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(known[1])))
    with pytest.raises(ConfigError, match="holds no"):
        read(tmp_path, known)


def test_a_missing_shard_is_named(tmp_path: Path, known: Found) -> None:
    folder = write_draft(tmp_path, llama_config(known[1]), known[2], shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(EyasError, match=r"model-00002-of-00003\.safetensors, which is missing"):
        read(folder, known)


def test_the_import_is_our_own_export(tmp_path: Path, known: Found) -> None:
    source = write_draft(tmp_path / "source", speculators_config(known[1], known[0]), as_layers(known[2]))
    first = import_draft(source, known[0], tmp_path / "baseline")
    spec, tensors = load_export(tmp_path / "baseline")
    assert spec == known[1]
    assert torch.equal(tensors["lm_head.weight"], known[2]["lm_head.weight"])
    assert import_draft(source, known[0], tmp_path / "baseline") == first  # left alone
    assert set(load_file(tmp_path / "baseline" / "model.safetensors")) == set(known[2])
