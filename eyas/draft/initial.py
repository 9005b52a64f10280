"""Where training starts: a draft that already predicts, solved in closed form from a sample of the data.

`norm` and the head rows are the target's. Ridge regression from the three aux states and the normalised
embedding of x[t+1] to the target's final state at t + 1 gives the best linear predictor of what the head
wants to see; its state part becomes fc, its embedding part goes through values and output of one query head
per key head. Those heads look at their own column, because query and key are the same random projection of
the embedding. Everything else starts small and random. docs/training.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from eyas.draft.data import Batch
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.draft.spec import NUM_AUX
from eyas.target.weights import TargetHead

SMALL = 0.1
"""Scale of random outputs to the residual: they start as a whisper beside the solved part."""
RIDGE = 1e-2
"""Ridge as a share of each feature's mean square."""
UNSOLVED_SCALE = 0.3
"""Where nothing is solved the head's logits are noise: less of it costs less to unlearn."""
MAX_HIDDEN_SIZE = 4096
"""The normal equations hold (4H)² numbers: 1 GB in fp32 at 4,096."""
SELF_SHARPNESS = 2.0
"""Score of a column with itself, in units of sqrt(d): e^(2·sqrt(d)) to one against an unlike token."""


@torch.no_grad()
def initialise(draft: Draft, head: TargetHead, rows: TargetRows, seed: int, sample: Iterable[Batch]) -> dict[str, float]:
    """Fill `draft` (fp32) from the target and from `sample`, batches of the training split (some 10,000 columns).

    Returns the scales of the learning rate for parameters whose inputs are far from mean square 1: aux states
    reach an rms of 50, and one step of Adam at the common rate would undo what was solved.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(SMALL)
    draft.norm.weight.copy_(head.norm)
    draft.lm_head.weight.copy_(rows.head)
    solved = _solve(draft, sample) if rows.has_states and draft.spec.hidden_size <= MAX_HIDDEN_SIZE else None
    if solved is None:
        draft.norm.weight.mul_(UNSOLVED_SCALE)
        return {}
    from_states, from_embedding, scale, aux_rms = solved
    draft.fc.weight.copy_(from_states)
    draft.norm.weight.mul_(scale)
    _look_at_own_column(draft, generator)
    _carry_embedding(draft, from_embedding)
    head_rms = float(head.norm.float().square().mean().sqrt())
    return {"fc.weight": 1 / max(aux_rms, 1.0), "lm_head.weight": 1 / max(head_rms, 1.0)}


@torch.no_grad()
def continue_from(draft: Draft, start: Mapping[str, torch.Tensor], head: TargetHead, sample: Iterable[Batch]) -> dict[str, float]:
    """Fill `draft` (fp32) with another's trained tensors; returns the scales of the learning rate, as `initialise` does."""
    for name, parameter in draft.named_parameters():
        parameter.copy_(start[name])
    power, count = 0.0, 0
    for batch in sample:
        aux = batch.aux[batch.active].float()
        power, count = power + float(aux.square().sum()), count + aux.numel()
    aux_rms = (power / max(count, 1)) ** 0.5
    head_rms = float(head.norm.float().square().mean().sqrt())
    return {"fc.weight": 1 / max(aux_rms, 1.0), "lm_head.weight": 1 / max(head_rms, 1.0)}


def _solve(draft: Draft, sample: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor, float, float] | None:
    """Regression to final / norm.weight: fc [H, 3H], embedding part [H, H], rms of what it predicts, rms of the aux states."""
    H, eps = draft.spec.hidden_size, draft.spec.rms_norm_eps
    size = (NUM_AUX + 1) * H
    gram, moment, count, power = torch.zeros(size, size), torch.zeros(size, H), 0, 0.0
    safe_norm = torch.where(draft.norm.weight.abs() < 1e-3, torch.ones(()), draft.norm.weight)
    for batch in sample:
        embedded = F.rms_norm(draft.embed_tokens[batch.tokens[batch.active]].float(), (H,), eps=eps)
        features = torch.cat([batch.aux[batch.active].float(), embedded], -1)  # [M, 4H]
        wanted = batch.labels.float() / safe_norm  # [M, H]: what norm must make of the state
        gram += features.T @ features
        moment += features.T @ wanted
        count += len(features)
        power += float(wanted.square().sum())
    if count < size // 4:
        return None  # too few columns say nothing of that many features
    gram, moment = gram.double() / count, moment.double() / count
    aux_rms = float(gram.diagonal()[: NUM_AUX * H].mean().sqrt())
    unit = gram.diagonal().clamp(min=1e-12).rsqrt()  # features to mean square 1
    gram = gram * unit.unsqueeze(1) * unit
    solution = torch.linalg.solve(gram + RIDGE * torch.eye(size, dtype=torch.float64), moment * unit.unsqueeze(1))
    explained = float((solution * (gram @ solution)).sum()) / max(power / count, 1e-12)
    solution = (solution * unit.unsqueeze(1)).float().T  # [H, 4H]
    return solution[:, : NUM_AUX * H], solution[:, NUM_AUX * H :], min(1.0, max(explained, 0.01)) ** 0.5, aux_rms


def _look_at_own_column(draft: Draft, generator: torch.Generator) -> None:
    """Keys, and the first query head of each group, become one random projection of the embedding."""
    spec = draft.spec
    H, d, groups = spec.hidden_size, spec.head_dim, spec.num_heads // spec.num_kv_heads
    projection = torch.randn(spec.num_kv_heads, d, H, generator=generator) * (SELF_SHARPNESS / H) ** 0.5
    q = draft.get_parameter("midlayer.self_attn.q_proj.weight").view(spec.num_kv_heads, groups, d, 2 * H)
    k = draft.get_parameter("midlayer.self_attn.k_proj.weight").view(spec.num_kv_heads, d, 2 * H)
    q[:, 0, :, :H], q[:, 0, :, H:] = projection, 0
    k[:, :, :H], k[:, :, H:] = projection, 0


def _carry_embedding(draft: Draft, matrix: torch.Tensor) -> None:
    """Factor [H, H] through values and the output of the first query head of each group, in their rank."""
    spec = draft.spec
    H, d, groups = spec.hidden_size, spec.head_dim, spec.num_heads // spec.num_kv_heads
    left, strength, right = torch.linalg.svd(matrix)
    rank = min(spec.num_kv_heads * d, H)
    root = strength[:rank].sqrt()
    values = draft.get_parameter("midlayer.self_attn.v_proj.weight")  # [kv · d, 2H]
    values[:, H:] *= SMALL
    values[:rank, :H] = right[:rank] * root.unsqueeze(1)
    output = draft.get_parameter("midlayer.self_attn.o_proj.weight").view(H, spec.num_kv_heads, groups, d)
    first = torch.zeros(H, spec.num_kv_heads * d)
    first[:, :rank] = left[:, :rank] * root
    output[:, :, 0] = first.view(H, spec.num_kv_heads, d)
