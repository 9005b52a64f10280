"""The table of what engines read, against the config that is exported and against configs that one of them would misread."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from eyas.draft.engines import CONTRACTS, faults_of
from eyas.draft.spec import DraftSpec

KIMI = DraftSpec(
    hidden_size=7168, intermediate_size=18432, num_heads=64, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=50000.0,
    rope_scaling=None, context_length=262144, vocab_size=163840, draft_vocab_size=32000, aux_blocks=(1, 29, 57),
)  # fmt: skip


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(KIMI.engine_config("bfloat16"))


def test_every_engine_reads_the_same_blocks_of_a_kimi_draft(config: dict[str, Any]) -> None:
    """61 layers: ids [1, 29, 57] in SGLang's spelling, [2, 30, 58] in vLLM's."""
    assert [(contract.engine, contract.blocks(config)) for contract in CONTRACTS] == [
        ("SGLang", (1, 29, 57)),
        ("vLLM", (1, 29, 57)),
    ]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert faults_of(config, (1, 29, 57)) == []


@pytest.mark.parametrize("key", sorted({key for contract in CONTRACTS for key in contract.keys}))
def test_a_key_that_an_engine_would_guess_is_named(config: dict[str, Any], key: str) -> None:
    """https://github.com/vllm-project/vllm/pull/50170, https://github.com/vllm-project/vllm/pull/38111"""
    del config[key]
    assert any(fault.startswith((f"{key} is absent", f"{key}.")) for fault in faults_of(config, (1, 29, 57)))


def test_one_spelling_for_both_engines_is_off_by_one_in_vllm(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 29, 57]
    assert faults_of(config, (1, 29, 57)) == ["vLLM 0.32.0 would read the outputs of blocks [0, 28, 56], trained on [1, 29, 57]"]


def test_ids_that_sglang_takes_raw_on_deepseek_are_refused(config: dict[str, Any]) -> None:
    """`deepseek_v2.py` adds one only where the first id is 1."""
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 29, 57]
    config["eagle_aux_hidden_state_layer_ids"] = [3, 30, 58]
    assert [fault.split(",")[0] for fault in faults_of(config, (2, 29, 57))] == ["the first block is 2"]


def test_both_rope_spellings_say_the_same(config: dict[str, Any]) -> None:
    config["rope_theta"] = 10000.0
    assert faults_of(config, (1, 29, 57)) == ["rope_theta differs from rope_parameters.rope_theta"]
