"""The EAGLE-3 draft: one decoder layer that predicts the target's next tokens from its own states.

g = fc([low | middle | high]); the layer attends over [input_norm(embed(x)) | hidden_norm(g)] with the
un-normed g as residual; its output *before* `norm` is the next unroll step's g. Parameter names are the
export's. What costs is bounded by what teaches: prompt columns give keys and values only, queries, MLP and
head run at supervised columns alone, and fc and step 0's keys are computed once for all steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from eyas.draft.attention import unroll_attention
from eyas.draft.data import Batch
from eyas.draft.rotary import Rotary
from eyas.draft.spec import NUM_AUX, DraftSpec


class Draft(nn.Module):
    """The trained tensors of a draft; `embed_tokens` (the target's, frozen) is given, never saved."""

    def __init__(self, spec: DraftSpec, embed_tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        H, I = spec.hidden_size, spec.intermediate_size  # noqa: E741
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.spec = spec
        self.fc = _linear(NUM_AUX * H, H, dtype)
        self.midlayer = nn.Module()
        self.midlayer.input_layernorm = _norm(spec, dtype)
        self.midlayer.hidden_norm = _norm(spec, dtype)
        self.midlayer.self_attn = nn.ModuleDict(
            {
                "q_proj": _linear(2 * H, q, dtype),
                "k_proj": _linear(2 * H, kv, dtype),
                "v_proj": _linear(2 * H, kv, dtype),
                "o_proj": _linear(q, H, dtype),
            }
        )
        self.midlayer.post_attention_layernorm = _norm(spec, dtype)
        self.midlayer.mlp = nn.ModuleDict(
            {"gate_proj": _linear(H, I, dtype), "up_proj": _linear(H, I, dtype), "down_proj": _linear(I, H, dtype)}
        )
        self.norm = _norm(spec, dtype)
        self.lm_head = _linear(H, spec.draft_vocab_size, dtype)
        self.rotary = Rotary(spec)
        self.embed_tokens = embed_tokens  # [V, H]; a plain attribute: no parameter, no buffer

    def cast(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Compute in `dtype`, and on `device` where one is given, from now on."""
        self.to(device, dtype)
        self.embed_tokens = self.embed_tokens.to(device, dtype)

    def unroll(self, batch: Batch, num_steps: int, *, recompute: bool = False) -> torch.Tensor:
        """States before `norm` of every unroll step at the active columns, [S, M, H].

        Step i at column t reads token x[t+1+i] and the state of step i−1 at t (step 0: g[t]). With `recompute` the
        backward pass keeps of the MLP its input only, and makes the rest again.
        """
        weights = _Weights.of(self)
        dtype, spec = weights.fc.dtype, self.spec
        fused = F.linear(batch.aux.to(dtype), weights.fc)  # [N, H]
        is_all_active = len(batch.active) == len(fused)
        embedded = self._embed(batch.tokens, weights.input_norm)  # [N, H]
        mixed = torch.cat([embedded, rms_norm(fused, weights.hidden_norm, spec.rms_norm_eps)], -1)  # [N, 2H]
        q_size = spec.num_heads * spec.head_dim
        k, v = F.linear(mixed, weights.qkv[q_size:]).chunk(2, -1)
        state = fused if is_all_active else fused[batch.active]  # [M, H]
        if spec.norm_before_residual:
            state = rms_norm(state, weights.hidden_norm, spec.rms_norm_eps)
        q = F.linear(mixed if is_all_active else mixed[batch.active], weights.qkv[:q_size])
        key_positions, positions = batch.positions, batch.positions[batch.active]
        k, v = self.rotary(_heads(k, spec), key_positions), _heads(v, spec)
        diagonal: list[tuple[torch.Tensor, torch.Tensor]] = []
        states = []
        for step in range(num_steps):
            if step:
                embedded = self._embed(batch.step_tokens[step - 1], weights.input_norm)  # [M, H]
                mixed = torch.cat([embedded, rms_norm(state, weights.hidden_norm, spec.rms_norm_eps)], -1)
                q, own_k, own_v = torch.split(
                    F.linear(mixed, weights.qkv), [q_size, k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]], -1
                )
                if spec.norm_before_residual:
                    state = mixed[:, spec.hidden_size :]
                diagonal.append((self.rotary(_heads(own_k, spec), positions + step), _heads(own_v, spec)))
            query = self.rotary(_heads(q, spec), positions + step)
            attended = unroll_attention(query, k, v, diagonal, batch.segments)  # [M, heads, d]
            finish = partial(checkpoint, self._finish_layer, use_reentrant=False) if recompute else self._finish_layer
            state = finish(state, attended.reshape(len(state), -1), weights)
            states.append(state)
        return torch.stack(states)

    def _embed(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(self.embed_tokens[tokens], weight, self.spec.rms_norm_eps)

    def _finish_layer(self, state: torch.Tensor, attended: torch.Tensor, weights: _Weights) -> torch.Tensor:
        state = state + F.linear(attended, weights.o)
        normed = rms_norm(state, weights.post_norm, self.spec.rms_norm_eps)
        down: torch.Tensor = _GatedDown.apply(F.linear(normed, weights.gate_up), weights.down)  # type: ignore[no-untyped-call]
        return state + down


class _Weights(NamedTuple):
    """The layer's weights with those that share an input fused into one matrix."""

    fc: torch.Tensor
    input_norm: torch.Tensor
    hidden_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, draft: Draft) -> _Weights:
        named: dict[str, torch.Tensor] = dict(draft.named_parameters())
        attention = [named[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
        return cls(
            fc=named["fc.weight"],
            input_norm=named["midlayer.input_layernorm.weight"],
            hidden_norm=named["midlayer.hidden_norm.weight"],
            post_norm=named["midlayer.post_attention_layernorm.weight"],
            qkv=torch.cat(attention),
            o=named["midlayer.self_attn.o_proj.weight"],
            gate_up=torch.cat([named["midlayer.mlp.gate_proj.weight"], named["midlayer.mlp.up_proj.weight"]]),
            down=named["midlayer.mlp.down_proj.weight"],
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) · weight over the last axis, in x's dtype."""
    normed: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    """Keeps x alone for the backward pass, where torch's own keeps two fp32 copies of it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        unit = x.to(wide, copy=True)
        scale = (unit.square().mean(-1, keepdim=True) + ctx.eps).rsqrt_()
        unit.mul_(scale)
        grad = grads[0].to(wide, copy=True)
        product = grad * unit
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean = (product @ weight.to(wide)).unsqueeze(-1) / x.shape[-1]
        return grad.mul_(weight).sub_(unit.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None


class _GatedDown(torch.autograd.Function):
    """down(silu(gate) · up) of gate_up [M, 2I]; keeps its input alone, for elementwise work is cheap to do again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Any, down: Any) -> Any:
        ctx.save_for_backward(gate_up, down)
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), down)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate_up, down = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad, silu = grads[0], F.silu(gate)
        grad_down = grad.T @ (silu * up)
        grad_product = grad @ down
        grad_gate = torch.ops.aten.silu_backward(grad_product * up, gate)
        return torch.cat([grad_gate, grad_product.mul_(silu)], -1), grad_down


def _heads(x: torch.Tensor, spec: DraftSpec) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, spec.head_dim)


def _linear(num_in: int, num_out: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False, dtype=dtype)


def _norm(spec: DraftSpec, dtype: torch.dtype) -> nn.RMSNorm:
    return nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps, dtype=dtype)
