"""Draft shapes for other families of targets, and the target's three tensors by the index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.draft.config import DraftConfig
from eyas.draft.data import make_batch
from eyas.draft.model import Draft
from eyas.draft.rotary import Rotary
from eyas.draft.spec import DraftSpec
from eyas.errors import ConfigError
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from eyas.target.weights import load_head
from tests.draft.runs import TARGET_CONFIG, H, V, write_target
from tests.draft.tiny import random_record

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {},
    "llama3": {"rope_scaling": LLAMA3},
    "qwen2": {"model_type": "qwen2", "head_dim": None},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "head_dim": None, "num_key_value_heads": 1},
    "gemma": {"model_type": "gemma2", "head_dim": 12},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "num_key_value_heads": 4,
        "head_dim": None,
        "rope_scaling": YARN,
    },
    "kimi_k25": {  # an outer config around a DeepSeek-V3 text model
        "model_type": "kimi_k25",
        "text_config": {
            **{key: value for key, value in TARGET_CONFIG.items() if key not in ("head_dim", "model_type")},
            "model_type": "kimi_k2",
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "rope_scaling": YARN,
        },
        **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")),
    },
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 8, "rope_scaling": YARN},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_draft_is_derived_from_any_family(tmp_path: Path, family: str) -> None:
    changes = {**FAMILIES[family]}
    folder = write_target(tmp_path / family, **changes)
    target = load_target(TargetConfig(model=str(folder)))
    spec = DraftSpec.from_target(target, DraftConfig(), 24)
    draft = Draft(spec, load_head(target, torch.float32).embed_tokens)
    assert (spec.num_heads * spec.head_dim) % 2 == 0
    assert spec.rope_scaling == (changes.get("text_config") or changes).get("rope_scaling")
    assert {name: tuple(value.shape) for name, value in draft.named_parameters()} == spec.tensor_shapes
    record = random_record(spec, [0, 0, 1, 1, 1, 1], 0)
    states = draft.unroll(make_batch([record], 3), 3)
    assert states.shape == (3, 3, H)
    states.sum().backward()
    assert all(torch.isfinite(value.grad).all() for name, value in draft.named_parameters() if value.grad is not None)
    assert sum(value.numel() for value in draft.parameters()) == spec.num_parameters


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_scaled_rope_equals_the_llama_of_transformers(tmp_path: Path, scaling: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    target = load_target(TargetConfig(model=str(write_target(tmp_path / "t", rope_scaling=scaling))))
    spec = DraftSpec.from_target(target, DraftConfig(), 24)
    raw = spec.engine_config("float32")
    config = LlamaConfig(**{key: raw[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")})
    config.rope_parameters = raw["rope_parameters"]
    q, positions = torch.randn(20, 4, 8), torch.arange(90, 110)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    wanted, _ = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), q.transpose(0, 1).unsqueeze(0), cos, sin)
    torch.testing.assert_close(Rotary(spec)(q, positions), wanted[0].transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_impossible_heads_are_refused(tmp_path: Path) -> None:
    target = load_target(TargetConfig(model=str(write_target(tmp_path / "t"))))
    with pytest.raises(ConfigError, match="num_kv_heads is 3"):
        DraftSpec.from_target(target, DraftConfig(num_kv_heads=3), 24)
    with pytest.raises(ConfigError, match="wanted 1 to the target's 96"):
        DraftSpec.from_target(target, DraftConfig(), 97)


def test_only_the_three_tensors_are_read_by_the_index(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", tie_word_embeddings=False)
    (folder / "model.safetensors").unlink()
    embed, head = torch.randn(V, H), torch.randn(V, H)
    save_file({"language_model.model.embed_tokens.weight": embed}, folder / "a.safetensors")
    save_file(
        {"language_model.model.norm.weight": torch.full((H,), 2.0), "language_model.lm_head.weight": head}, folder / "b.safetensors"
    )
    weight_map = {
        "language_model.model.embed_tokens.weight": "a.safetensors",
        "language_model.model.norm.weight": "b.safetensors",
        "language_model.lm_head.weight": "b.safetensors",
        "language_model.model.layers.0.mlp.experts.0.w.weight": "absent.safetensors",  # never opened
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_head(load_target(TargetConfig(model=str(folder))), torch.float32)
    assert torch.equal(loaded.embed_tokens, embed)
    assert torch.equal(loaded.lm_head, head)
    assert torch.equal(loaded.norm, torch.full((H,), 2.0))


def test_a_tied_head_is_the_embeddings_themselves(tmp_path: Path) -> None:
    loaded = load_head(load_target(TargetConfig(model=str(write_target(tmp_path / "t")))), torch.float32)
    assert loaded.lm_head is loaded.embed_tokens


def test_gemma_stores_its_norm_less_one(tmp_path: Path) -> None:
    target = load_target(TargetConfig(model=str(write_target(tmp_path / "t", model_type="gemma2"))))
    assert torch.equal(load_head(target, torch.float32).norm, torch.full((H,), 2.0))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": torch.ones(H)}, "no tensor"),
        ({"model.embed_tokens.weight": torch.ones(V, H + 1), "model.norm.weight": torch.ones(H)}, r"wanted unquantised \[96, 32\]"),
        ({"model.embed_tokens.weight": torch.ones(V, H, dtype=torch.int8), "model.norm.weight": torch.ones(H)}, "int8"),
        ({"model.embed_tokens.weight": torch.ones(V, H), "model.norm.weight": torch.full((H,), torch.inf)}, "not finite"),
    ],
)
def test_unusable_tensors_of_the_target_are_refused(tmp_path: Path, tensors: dict, message: str) -> None:
    folder = write_target(tmp_path / "t")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_head(load_target(TargetConfig(model=str(folder))), torch.float32)


def test_an_untied_target_without_head_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight"):
        load_head(load_target(TargetConfig(model=str(folder))), torch.float32)
    assert TARGET_CONFIG["tie_word_embeddings"] is True
