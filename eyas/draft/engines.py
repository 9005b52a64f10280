"""What each serving engine reads of an exported draft, by version, as data; and the check that a config means the same to all.

Both read one `config.json` with different eyes, and neither complains: SGLang takes its layer ids as *output of block*,
vLLM takes its own as *input to layer*, one higher, and where a key is absent each falls back on a default of its own.
Read in the engines' sources: SGLang `models/llama_eagle3.py` and `models/deepseek_v2.py`, vLLM `models/llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_SHARED_KEYS = (
    "architectures",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "tie_word_embeddings",
    "num_aux_hidden_states",
    "attention_bias",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)


@dataclass(frozen=True, kw_only=True)
class EngineContract:
    """How one version of an engine reads a draft."""

    engine: str
    version: str
    keys: tuple[str, ...]
    """Keys of `config.json` that it reads; each must be written, for its absence is filled with a guess."""
    layer_ids: tuple[str, ...]
    """Where its layer ids stand."""
    layer_shift: int
    """Block whose output is read = id + shift."""
    rope: Literal["rope_parameters", "rope_theta"]
    """The spelling it looks for first."""

    def blocks(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """The blocks whose outputs the engine takes under this config; raises `KeyError` naming what is absent."""
        value: Any = config
        for key in self.layer_ids:
            value = value[key]
        return tuple(int(number) + self.layer_shift for number in value)


CONTRACTS = (
    EngineContract(
        engine="SGLang",
        version="0.5.23",
        keys=(*_SHARED_KEYS, "eagle_config"),
        layer_ids=("eagle_config", "eagle_aux_hidden_state_layer_ids"),
        layer_shift=0,
        rope="rope_parameters",
    ),
    EngineContract(
        engine="vLLM",
        version="0.32.0",
        keys=(*_SHARED_KEYS, "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
        layer_ids=("eagle_aux_hidden_state_layer_ids",),
        layer_shift=-1,
        rope="rope_parameters",
    ),
)


def faults_of(config: Mapping[str, Any], aux_blocks: tuple[int, ...]) -> list[str]:
    """What any engine would misread: an absent key, other layers, another rope; empty for a config that all read alike.

    SGLang's DeepSeek and Kimi models add one to the ids only if the first is 1, so the first must be 1.
    """
    faults = []
    for contract in CONTRACTS:
        name = f"{contract.engine} {contract.version}"
        faults += [f"{key} is absent, {name} would guess it" for key in (*contract.keys, contract.rope) if key not in config]
        try:
            seen = contract.blocks(config)
        except (KeyError, TypeError):
            faults.append(f"{'.'.join(contract.layer_ids)} is absent, {name} would guess the layers")
            continue
        if seen != aux_blocks:
            faults.append(f"{name} would read the outputs of blocks {list(seen)}, trained on {list(aux_blocks)}")
    if aux_blocks[0] != 1:
        faults.append(f"the first block is {aux_blocks[0]}, wanted 1: SGLang reads the ids of DeepSeek and Kimi targets so")
    if config.get("rope_theta") != (config.get("rope_parameters") or {}).get("rope_theta"):
        faults.append("rope_theta differs from rope_parameters.rope_theta")
    return faults
