"""The forward pass of an exported EAGLE-3 draft: one Llama-style layer whose attention reads 2H.

[input_norm(embed(x)) | hidden_norm(g)] goes into attention, the un-normed g is the residual, and the layer's output
*before* `norm` is the state of the next chain step. g = fc([low | middle | high]) for columns the target has seen.
Its keys and values lie in one more layer of the target's page pool, at the same pages and places.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from eyas.draft.export import load_export
from eyas.draft.spec import DraftSpec
from eyas.engine.attention import Norm
from eyas.engine.linear import Linear
from eyas.engine.model import Attention, Mlp, Rotary, Step, TargetModel
from eyas.engine.pages import LayerCache
from eyas.errors import ConfigError
from eyas.target.spec import TargetSpec


class DraftModel:
    """A draft for `target`, in the target's precision and with its embeddings."""

    def __init__(self, folder: Path, target: TargetModel) -> None:
        self.spec, tensors = load_export(folder)
        check_fits(self.spec, target.spec, folder)
        spec = self.spec
        source = TensorTable(tensors, target.dtype)
        self._embed_tokens = target.embed_tokens
        self._fc = Linear(source.take("fc.weight"))
        self._input_norm = Norm(source.take("midlayer.input_layernorm.weight"), spec.rms_norm_eps)
        self._hidden_norm = Norm(source.take("midlayer.hidden_norm.weight"), spec.rms_norm_eps)
        self._output_norm = Norm(source.take("midlayer.post_attention_layernorm.weight"), spec.rms_norm_eps)
        self._mlp = Mlp(source, "midlayer.mlp.")
        self._norm = Norm(source.take("norm.weight"), spec.rms_norm_eps)
        self._lm_head = Linear(source.take("lm_head.weight"))
        self._target_ids = torch.arange(spec.draft_vocab_size) + tensors["d2t"]  # [D]: d2t holds offsets
        rope = {"rope_theta": spec.rope_theta, **(spec.rope_scaling or {"rope_type": "default"})}
        config = LlamaConfig(
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.num_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.context_length,
            rope_parameters=rope,
        )
        self._attention = Attention(
            source,
            "midlayer.self_attn.",
            Rotary(config, spec.head_dim, target.spec.context_length),
            num_kv=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
        )

    def fuse(self, aux: Tensor) -> Tensor:
        """g [N, H] of the target's auxiliary states [N, 3H]."""
        return self._fc(aux)

    def forward(self, step: Step, states: Tensor, cache: LayerCache) -> Tensor:
        """Run the layer at the rows of `step` with `states` [N, H] → the states before `norm` [N, H]."""
        embedded = functional.embedding(step.token_ids, self._embed_tokens)
        mixed = torch.cat([self._input_norm(embedded), self._hidden_norm(states)], dim=-1)  # [N, 2H]
        residual = mixed[:, self.spec.hidden_size :] if self.spec.norm_before_residual else states
        hidden = self._attention(mixed, residual, cache, step)
        return self._mlp(self._output_norm(hidden), hidden)

    def propose(self, states: Tensor) -> Tensor:
        """The most likely next token, as a target id, of each row of `states` [N, H] → [N]."""
        return self._target_ids[self._lm_head(self._norm(states)).max(-1).indices]


class TensorTable:
    """Tensors in memory, taken by name and cast to `dtype`."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype

    def take(self, name: str) -> Tensor:
        """The tensor `name`; the loader has checked that it is there."""
        return self._tensors[name].to(self._dtype)

    def optional(self, name: str) -> Tensor | None:
        """The tensor `name`, or None."""
        return self.take(name) if name in self._tensors else None


def check_fits(draft: DraftSpec, target: TargetSpec, folder: Path) -> None:
    """Raise `ConfigError` if the draft was made for another target."""
    wanted = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "aux_blocks": target.aux_blocks,
        "head_dim": target.head_dim,
    }
    for name, value in wanted.items():
        seen = getattr(draft, name)
        if seen != value:
            raise ConfigError(
                f"draft {folder} has {name} {seen}, target {target.folder} has {value}; give the draft of this target"
            )
