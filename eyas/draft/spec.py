"""The shape of a draft, derived from its target: one Llama-style layer whose attention takes 2H.

The exact set of tensors (`tensor_shapes`) and the one `config.json` for both engines (`engine_config`)
have their home here; everything that writes or reads a draft uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.draft.config import DraftConfig
from eyas.errors import ConfigError
from eyas.target.spec import TargetSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_AUX = 3


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """Sizes of a draft; H `hidden_size`, D `draft_vocab_size`, V `vocab_size`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    context_length: int
    vocab_size: int
    draft_vocab_size: int
    aux_blocks: tuple[int, int, int]
    """Target layers read, named by the *output* of block k."""
    eos_token_ids: tuple[int, ...] = ()
    norm_before_residual: bool = False
    """The residual is the normed state: how speculators trains. vLLM 0.32.0 reads the key, SGLang 0.5.23 ignores it."""

    @classmethod
    def from_target(cls, target: TargetSpec, config: DraftConfig, draft_vocab_size: int) -> DraftSpec:
        """The draft of `target`; what `config` leaves at 0 follows the target. Raises `ConfigError` for impossible sizes."""
        num_kv_heads = config.num_kv_heads or target.num_kv_heads
        spec = cls(
            hidden_size=target.hidden_size,
            intermediate_size=config.intermediate_size or target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope["theta"],
            rope_scaling=target.rope["scaling"],
            context_length=target.context_length,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            aux_blocks=target.aux_blocks,
            eos_token_ids=tuple(target.eos_token_ids),
        )
        spec.check()
        return spec

    def check(self) -> None:
        """Refuse sizes that no engine can serve."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"draft.num_kv_heads is {self.num_kv_heads}, wanted a divisor of the {self.num_heads} heads")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embedding wants an even one; this target is not supported")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft vocabulary is {self.draft_vocab_size}, wanted 1 to the target's {self.vocab_size}")

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor by its name in the export, with its shape."""
        H, I, A = self.hidden_size, self.intermediate_size, NUM_AUX  # noqa: E741
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "fc.weight": (H, A * H),
            "midlayer.input_layernorm.weight": (H,),
            "midlayer.hidden_norm.weight": (H,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * H),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
            "midlayer.self_attn.o_proj.weight": (H, q),
            "midlayer.post_attention_layernorm.weight": (H,),
            "midlayer.mlp.gate_proj.weight": (I, H),
            "midlayer.mlp.up_proj.weight": (I, H),
            "midlayer.mlp.down_proj.weight": (H, I),
            "norm.weight": (H,),
            "lm_head.weight": (self.draft_vocab_size, H),
        }

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        total = 0
        for shape in self.tensor_shapes.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    def engine_config(self, dtype: str) -> dict[str, Any]:
        """The `config.json` that SGLang 0.5.23 and vLLM 0.32.0 both read; every key they look at is written.

        SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids` as *output of block*; vLLM reads the
        top-level key first, as *input to layer*, one higher. Both rope spellings are written.
        """
        rope = {"rope_theta": self.rope_theta, **(self.rope_scaling or {"rope_type": "default"})}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": rope,
            "max_position_embeddings": self.context_length,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": list(self.eos_token_ids),
            "dtype": dtype,
            "torch_dtype": dtype,
            "num_aux_hidden_states": NUM_AUX,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.aux_blocks),
                "use_aux_hidden_state": True,
                "norm_before_fc": False,
            },
            "eagle_aux_hidden_state_layer_ids": [block + 1 for block in self.aux_blocks],
        }
