"""A slow, obvious EAGLE-3 draft in float64: it decodes one token at a time with a growing list of keys, no tricks.

For every column t of a record it builds the chain that an engine would run: the keys of step 0 for columns
0..t, then one further key per step. Loops over columns, heads and steps; nothing packed, fused or merged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eyas.draft.data import Record
from eyas.draft.spec import DraftSpec


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = len(x) // 2
    out = []
    for index in range(len(x)):
        angle = position * theta ** (-2 * (index % half) / len(x))
        other = -x[index + half] if index < half else x[index - half]
        out.append(x[index] * math.cos(angle) + other * math.sin(angle))
    return torch.stack(out)


@dataclass
class Step:
    state: torch.Tensor  # [H], before the final norm
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class SlowDraft:
    """Weights by export name, float64."""

    def __init__(self, spec: DraftSpec, weights: dict[str, torch.Tensor], embed: torch.Tensor) -> None:
        self.spec, self.w, self.embed = spec, weights, embed

    def qkv(self, token: int, state: torch.Tensor, position: int) -> tuple[list[torch.Tensor], ...]:
        spec, w = self.spec, self.w
        e = norm(self.embed[token], w["midlayer.input_layernorm.weight"], spec.rms_norm_eps)
        h = norm(state, w["midlayer.hidden_norm.weight"], spec.rms_norm_eps)
        x = torch.cat([e, h])
        q = (w["midlayer.self_attn.q_proj.weight"] @ x).view(spec.num_heads, spec.head_dim)
        k = (w["midlayer.self_attn.k_proj.weight"] @ x).view(spec.num_kv_heads, spec.head_dim)
        v = (w["midlayer.self_attn.v_proj.weight"] @ x).view(spec.num_kv_heads, spec.head_dim)
        return (
            [rotate(head, position, spec.rope_theta) for head in q],
            [rotate(head, position, spec.rope_theta) for head in k],
            list(v),
        )

    def layer(self, state: torch.Tensor, q: list[torch.Tensor], keys: list, values: list) -> torch.Tensor:
        spec, w = self.spec, self.w
        if spec.norm_before_residual:
            state = norm(state, w["midlayer.hidden_norm.weight"], spec.rms_norm_eps)
        heads = []
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            scores = torch.stack([q[head] @ key[group] for key in keys]) / math.sqrt(spec.head_dim)
            share = torch.softmax(scores, 0)
            heads.append(sum(share[n] * values[n][group] for n in range(len(values))))
        state = state + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = norm(state, w["midlayer.post_attention_layernorm.weight"], spec.rms_norm_eps)
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        return state + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def chain(self, record: Record, column: int, num_steps: int) -> list[torch.Tensor]:
        """Draft logits [D] of each step at `column`, fed with the record's own tokens while they last."""
        tokens = record.tokens.tolist()
        keys, values = [], []
        for t in range(column + 1):
            g = self.w["fc.weight"] @ record.aux[t]
            q, k, v = self.qkv(tokens[t + 1], g, t)
            keys.append(k)
            values.append(v)
        state, logits = g, []
        for step in range(num_steps):
            if step:
                if column + 1 + step >= len(tokens):
                    break
                q, k, v = self.qkv(tokens[column + 1 + step], state, column + step)
                keys.append(k)
                values.append(v)
            state = self.layer(state, q, keys, values)
            out = norm(state, self.w["norm.weight"], self.spec.rms_norm_eps)
            logits.append(self.w["lm_head.weight"] @ out)
        return logits


def turns(mask: list[int]) -> list[int | None]:
    """The turn number of every token, None outside."""
    numbers, turn = [], -1
    for index, value in enumerate(mask):
        if value and (index == 0 or not mask[index - 1]):
            turn += 1
        numbers.append(turn if value else None)
    return numbers


@dataclass
class SlowResult:
    loss: torch.Tensor
    step_loss: list[float]
    kept: list[int]
    supervised: list[int]
    hits: list[int]
    verifications: int
    accepted: int


def slow_loss(
    draft: SlowDraft, records: list[Record], lm_head: torch.Tensor, kept_ids: list[int], num_steps: int, decay: float
) -> SlowResult:
    """Loss, per-step counts and the replayed walk of `records`, straight from the definitions."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(num_steps)]
    kept, supervised, hits = [0] * num_steps, [0] * num_steps, [0] * num_steps
    verifications = accepted = 0
    for record in records:
        numbers = turns(record.loss_mask.tolist())
        length = len(numbers)
        hit: dict[tuple[int, int], bool] = {}
        for column in range(length - 2):
            if numbers[column + 1] is None:
                continue
            logits = draft.chain(record, column, num_steps)
            for step in range(num_steps):
                label = column + 2 + step
                if label >= length or numbers[label] != numbers[column + 1]:
                    continue
                target = lm_head @ record.final[label - 1]
                best = int(target.argmax())
                guess = kept_ids[int(logits[step].argmax())]
                supervised[step] += 1
                hit[column, step] = guess == best
                hits[step] += guess == best
                if best not in kept_ids:
                    continue
                p = torch.softmax(target[kept_ids], 0)
                kept[step] += 1
                sums[step] = sums[step] - (p * torch.log_softmax(logits[step], 0)).sum()
        column = 0
        while column < length - 2:
            if (column, 0) not in hit:
                column += 1
                continue
            run = 0
            while run < num_steps and hit.get((column, run), False):
                run += 1
            verifications, accepted, column = verifications + 1, accepted + run, column + run + 1
    loss = sum(decay**step * sums[step] / max(kept[step], 1) for step in range(num_steps))
    return SlowResult(loss, [float(x) for x in sums], kept, supervised, hits, verifications, accepted)
