"""Tiny draft shapes, random weights and records for the tests of the draft."""

from __future__ import annotations

import torch

from eyas.draft.data import Record
from eyas.draft.model import Draft
from eyas.draft.spec import DraftSpec


def tiny_spec(**changes: object) -> DraftSpec:
    values: dict = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "rope_scaling": None,
        "context_length": 256,
        "vocab_size": 40,
        "draft_vocab_size": 24,
        "aux_blocks": (1, 3, 4),
        "eos_token_ids": (2,),
    }
    return DraftSpec(**{**values, **changes})


def random_record(spec: DraftSpec, mask: list[int], seed: int, *, name: str = "r", dataset: str = "a") -> Record:
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return Record(
        id=f"{name}{seed}",
        dataset=dataset,
        tokens=torch.randint(0, spec.vocab_size, (length,), generator=generator),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        aux=torch.randn(length, 3 * spec.hidden_size, generator=generator, dtype=torch.float64),
        final=torch.randn(length, spec.hidden_size, generator=generator, dtype=torch.float64),
    )


def random_draft(spec: DraftSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> Draft:
    torch.manual_seed(seed)
    draft = Draft(spec, torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64), dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 2 else 0.2) + (parameter.dim() == 1))
    return draft


def random_map(spec: DraftSpec, seed: int = 0) -> torch.Tensor:
    """Offsets d2t [D] of a random ascending choice of ids."""
    ids = torch.randperm(spec.vocab_size, generator=torch.Generator().manual_seed(seed))[: spec.draft_vocab_size].sort().values
    return ids - torch.arange(len(ids))
