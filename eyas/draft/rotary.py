"""Rotary position embedding in the halves layout of Llama, scaled as the target's config says.

The frequencies of a scaled rope come from transformers' own table of rope types, so that a draft rotates
exactly as the engines' `LlamaConfig` of the export will.
"""

from __future__ import annotations

import torch

from eyas.draft.spec import DraftSpec
from eyas.errors import ConfigError


class Rotary:
    """Rotates [rows, heads, d] by integer positions [rows]."""

    def __init__(self, spec: DraftSpec) -> None:
        self.inverse_frequencies, self.factor = _frequencies(spec)  # [d / 2] float64

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        self.inverse_frequencies = self.inverse_frequencies.to(x.device)
        angles = positions.unsqueeze(-1) * self.inverse_frequencies  # [rows, d / 2]
        cos, sin = ((f(angles) * self.factor).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _frequencies(spec: DraftSpec) -> tuple[torch.Tensor, float]:
    if not spec.rope_scaling:
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        return spec.rope_theta**-exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(spec.rope_scaling)
    rope_type = str(scaling.get("rope_type", scaling.get("type", "default")))
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"rope type {rope_type!r} is not known; known: {', '.join(sorted(ROPE_INIT_FUNCTIONS))}")
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rope_parameters={**scaling, "rope_type": rope_type, "rope_theta": spec.rope_theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return frequencies.double(), float(factor)
