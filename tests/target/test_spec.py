from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import ConfigError
from eyas.target.config import TargetConfig
from eyas.target.spec import load_target
from tests.target.tiny_target import write_target


def test_aux_blocks_are_named_by_the_output_of_a_block(tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(write_target(tmp_path / "t", config={"num_hidden_layers": 61}))))
    assert spec.aux_blocks == (1, 29, 57)  # 61 layers: the reference case


@pytest.mark.parametrize("nested", [False, True])
def test_sizes_come_from_the_config_nested_or_not(tmp_path: Path, nested: bool) -> None:
    spec = load_target(TargetConfig(model=str(write_target(tmp_path / "t", nested=nested))))
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 8, 4, 2, 8)
    assert spec.context_length == 2048
    assert spec.rope == {"theta": 10000.0, "scaling": None}


def test_end_tokens_are_those_of_both_configs(tmp_path: Path) -> None:
    spec = load_target(TargetConfig(model=str(write_target(tmp_path / "t", config={"eos_token_id": 1}))))
    assert spec.eos_token_ids == [0, 1, 2]


def test_fewer_than_eight_layers_are_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", config={"num_hidden_layers": 7})
    with pytest.raises(ConfigError, match="7 layers, a draft needs at least 8"):
        load_target(TargetConfig(model=str(folder)))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_size_is_named(tmp_path: Path, key: str) -> None:
    folder = write_target(tmp_path / "t", config={key: None})
    with pytest.raises(ConfigError, match=key):
        load_target(TargetConfig(model=str(folder)))


@pytest.mark.parametrize("model", ["/nowhere/at/all", "package:unknown"])
def test_an_unknown_model_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=model):
        load_target(TargetConfig(model=model))


def test_fingerprint_follows_config_template_weights_and_revision(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t")
    config = TargetConfig(model=str(folder))
    seen = {load_target(config).fingerprint, load_target(config).fingerprint}
    assert len(seen) == 1
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    seen.add(load_target(config).fingerprint)
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")  # same names and shapes, other values
    seen.add(load_target(config).fingerprint)
    seen.add(load_target(config.model_copy(update={"revision": "v2"})).fingerprint)
    (folder / "chat_template.jinja").write_text("other")
    seen.add(load_target(config).fingerprint)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "rope_theta": 5.0}))
    seen.add(load_target(config).fingerprint)
    assert len(seen) == 6


def test_tokenizer_fingerprint_ignores_weights(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t")
    config = TargetConfig(model=str(folder))
    before = load_target(config).tokenizer_fingerprint
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    assert load_target(config).tokenizer_fingerprint == before
    assert load_target(config.model_copy(update={"chat_template_kwargs": {"thinking": False}})).tokenizer_fingerprint != before
