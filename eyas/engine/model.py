"""The target's forward pass, written out: dense Llama-family models from their safetensors, nothing of transformers' modules.

One pass takes the rows of everything that runs, decoding rows first and then pieces of prompts, as one flat batch of
tokens. It returns the *final state* (the input of lm_head, after the final norm) and, if asked, the three auxiliary
states (outputs of blocks 1, n//2 - 1, n - 4) that a draft reads.
Supported: RMSNorm, rotary positions with any of transformers' scalings, grouped queries, optional biases of q, k, v
and norms of q, k, tied or untied head. Anything else is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.engine.attention import AttentionPlan, Heads, Norm, Rows
from eyas.engine.drawing import sample
from eyas.engine.linear import Linear
from eyas.engine.pages import LayerCache
from eyas.engine.sampling import SamplingParams
from eyas.errors import ConfigError
from eyas.files import read_json
from eyas.target.spec import TargetSpec

_POSITIONS_BEYOND = 64
"""Drafts may reach past the context; what they find there is never part of a reply."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of one forward pass: those of decoding requests, then pieces of prompts."""

    token_ids: Tensor  # [N] int64
    prompts: list[Rows]
    plan: AttentionPlan
    """The attention of all rows, the same in every layer."""

    @classmethod
    def of(cls, token_ids: Tensor, decoding: list[Rows], prompts: list[Rows]) -> Step:
        """From the ids of all rows and whose they are."""
        return cls(token_ids=token_ids, prompts=prompts, plan=AttentionPlan(decoding, prompts))


class TensorSource(Protocol):
    """Where a layer takes its tensors from, by name."""

    def take(self, name: str) -> Tensor:
        """The tensor `name`."""

    def optional(self, name: str) -> Tensor | None:
        """The tensor `name`, or None."""


class Rotary:
    """Cosines and sines [positions, D/2] float32 for the positions of one model."""

    def __init__(self, config: PretrainedConfig, head_dim: int, num_positions: int) -> None:
        frequencies, factor = _rope_frequencies(config, head_dim)
        angles = torch.arange(num_positions + _POSITIONS_BEYOND, dtype=torch.float32)[:, None] * frequencies.float()
        self.cos = (angles.cos() * factor).numpy()
        self.sin = (angles.sin() * factor).numpy()


class Attention:
    """Self-attention of one layer: fused q, k, v product, rotary positions, cache write, output product with residual."""

    def __init__(self, tensors: TensorSource, prefix: str, rotary: Rotary, *, num_kv: int, head_dim: int, eps: float) -> None:
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        biases = [tensors.optional(f"{name}.bias") for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        self.qkv = Linear(torch.cat([tensors.take(f"{name}.weight") for name in names]), bias)
        self.out = Linear(tensors.take(f"{prefix}o_proj.weight"), tensors.optional(f"{prefix}o_proj.bias"))
        norms = [tensors.optional(f"{prefix}{name}_norm.weight") for name in "qk"]
        arrays = [torch.empty(0).numpy() if norm is None else norm.float().numpy() for norm in norms]
        self.heads = Heads(
            num_kv=num_kv, head_dim=head_dim, cos=rotary.cos, sin=rotary.sin, q_norm=arrays[0], k_norm=arrays[1], eps=eps
        )

    def __call__(self, x: Tensor, residual: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """`x` [N, in], `residual` [N, H] → residual + attention, [N, H]; writes the rows' keys and values to `cache`."""
        qkv = self.qkv(x)  # [N, (heads + 2 kv) * D]
        return self.out.plus(self.heads.attend(qkv, cache, step.plan), residual)


class Mlp:
    """down(silu(gate(x)) · up(x)) + residual, the elementwise parts riding on the matrix products."""

    def __init__(self, tensors: TensorSource, prefix: str) -> None:
        self.gate, self.up, self.down = (Linear(tensors.take(f"{prefix}{name}_proj.weight")) for name in ("gate", "up", "down"))

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x`, `residual` [N, H] → [N, H]."""
        return self.down.plus(self.up.times(x, self.gate.silu(x)), residual)


class TargetModel:
    """A dense decoder-only model in `dtype`, on the CPU."""

    def __init__(self, spec: TargetSpec, dtype: torch.dtype) -> None:
        config = check_supported(spec)
        self.spec, self.dtype, self.eps = spec, dtype, spec.rms_norm_eps
        tensors = Weights(spec.folder, dtype)
        self.embed_tokens = tensors.take("model.embed_tokens.weight")  # [V, H]
        self.layers = []
        rotary = Rotary(config, spec.head_dim, spec.context_length)
        for index in range(spec.num_layers):
            prefix = f"model.layers.{index}."
            attention = Attention(
                tensors,
                f"{prefix}self_attn.",
                rotary,
                num_kv=spec.num_kv_heads,
                head_dim=spec.head_dim,
                eps=self.eps,
            )
            norms = [Norm(tensors.take(f"{prefix}{name}_layernorm.weight"), self.eps) for name in ("input", "post_attention")]
            self.layers.append((norms[0], attention, norms[1], Mlp(tensors, f"{prefix}mlp.")))
        self.norm = Norm(tensors.take("model.norm.weight"), self.eps)
        self.lm_head = Linear(self.embed_tokens if spec.tie_word_embeddings else tensors.take("lm_head.weight"))
        tensors.check_all_taken(ignored={"lm_head.weight"} if spec.tie_word_embeddings else set())

    def warm_up(self) -> None:
        """Run one prompt token and one decoded token, so that everything is compiled before the first request."""
        cache = LayerCache(1, self.spec.num_kv_heads, self.spec.head_dim, self.dtype)
        first, second = (Rows(start=0, stop=1, first=position, pages=[0]) for position in range(2))
        with torch.inference_mode():
            for step in (
                Step.of(torch.tensor([0]), [], [first]),
                Step.of(torch.tensor([0]), [second], []),
            ):
                logits = self.lm_head(self.forward(step, [cache] * self.spec.num_layers)[0])
                sample(logits, [0], [SamplingParams()], [0.5])

    def forward(self, step: Step, caches: list[LayerCache], *, wants_aux: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run `step` over `caches` (one per layer) → final state [N, H], auxiliary states [N, 3H] or None."""
        hidden = functional.embedding(step.token_ids, self.embed_tokens)
        aux = []
        for index, (input_norm, attention, output_norm, mlp) in enumerate(self.layers):
            hidden = attention(input_norm(hidden), hidden, caches[index], step)
            hidden = mlp(output_norm(hidden), hidden)
            if wants_aux and index in self.spec.aux_blocks:
                aux.append(hidden)
        final = self.norm(hidden)
        return final, torch.cat(aux, -1) if aux else None


class Weights:
    """The tensors of a model folder by name, each taken once and cast to `dtype`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        index = folder / "model.safetensors.index.json"
        files = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        try:
            self._open = [safe_open(folder / name, framework="pt") for name in files]
        except (OSError, ValueError) as error:
            raise ConfigError(f"weights of target {folder} cannot be opened ({error}); fetch its safetensors again") from error
        self._file_of = {name: file for file in self._open for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def take(self, name: str) -> Tensor:
        """The tensor `name`; raises `ConfigError` if the folder lacks it."""
        tensor = self.optional(name)
        if tensor is None:
            raise ConfigError(
                f"target {self._folder} has no tensor {name!r}; its architecture is not one of {', '.join(ARCHITECTURES)}"
            )
        return tensor

    def optional(self, name: str) -> Tensor | None:
        """The tensor `name`, or None."""
        file = self._file_of.pop(name, None)
        if file is None:
            return None
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.to(self._dtype)

    def check_all_taken(self, ignored: set[str]) -> None:
        """Raise `ConfigError` if a tensor was left over: the model has a part that this forward pass does not know."""
        left = sorted(name for name in self._file_of if name not in ignored and not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ConfigError(
                f"target {self._folder} has tensors the embedded engine does not know, such as {left[0]!r}; serve it with SGLang"
            )


def check_supported(spec: TargetSpec) -> PretrainedConfig:
    """The target's transformers config; raises `ConfigError`, one line, for an architecture that is not written out here."""
    if spec.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"target {spec.folder} is a {spec.architecture or spec.model_type!r}, the embedded engine runs "
            f"{', '.join(ARCHITECTURES)}; serve it with SGLang and give server.kind sglang with its URL"
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(spec.folder, local_files_only=True)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and window < spec.context_length:
        raise ConfigError(
            f"target {spec.folder} attends through a sliding window of {window} tokens; set target.context_length to at most that"
        )
    if spec.head_dim % 8:
        raise ConfigError(
            f"target {spec.folder} has a head_dim of {spec.head_dim}, the embedded engine computes multiples of 8; "
            "serve it with SGLang and give server.kind sglang with its URL"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"target {spec.folder} uses the activation {config.hidden_act!r}, the embedded engine knows silu only")
    return config


def _rope_frequencies(config: PretrainedConfig, head_dim: int) -> tuple[Tensor, float]:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        raise ConfigError(f"rotary scaling {kind!r} depends on the request's length, which the embedded engine does not do")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return frequencies, float(factor)
