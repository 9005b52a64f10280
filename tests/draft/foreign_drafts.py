"""The same draft as other projects write it: names, configs and files of each layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.draft.spec import DraftSpec
from eyas.target.spec import TargetSpec
from tests.draft.runs import D

KEPT = [*range(0, 2 * D - 8, 2), 88, 89, 94, 95]
"""Ids that the draft proposes; offsets and ids differ."""


def draft_tensors(spec: DraftSpec, seed: int = 3) -> dict[str, torch.Tensor]:
    """Random tensors by our names, with the map of `KEPT`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in spec.tensor_shapes.items()}
    ids = torch.tensor(KEPT)
    t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}


def llama_config(spec: DraftSpec, **changes: object) -> dict:
    """What SpecForge and EAGLE write beside their weights."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        **changes,
    }


def speculators_config(spec: DraftSpec, target: TargetSpec, **changes: object) -> dict:
    """What speculators 0.9.0 writes: the shape nested, rope in transformers 5's spelling, layer ids as inputs."""
    inner = llama_config(spec)
    for key in ("architectures", "draft_vocab_size", "rope_theta", "rope_scaling"):
        inner.pop(key)
    inner["rope_parameters"] = {"rope_theta": spec.rope_theta, "rope_type": "default"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [block + 1 for block in target.aux_blocks],
        **changes,
    }


def write_draft(folder: Path, config: dict, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> Path:
    """A folder of safetensors, whole or sharded with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def as_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of vLLM and speculators."""
    return {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
