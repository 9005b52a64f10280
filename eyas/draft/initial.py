"""Where training starts: what of the target is copied into a fresh draft (docs/training.md has the figures)."""

from __future__ import annotations

import torch

from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.target.weights import TargetHead


@torch.no_grad()
def initialise(draft: Draft, head: TargetHead, rows: TargetRows, seed: int) -> None:
    """Fill `draft` from the target: `norm` and head rows copied, fc passes the high states on, the layer starts near zero.

    Without training the draft then predicts from the high layer's state what the target's head would.
    """
    generator = torch.Generator().manual_seed(seed)
    H = draft.spec.hidden_size
    for parameter in draft.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        draft.get_parameter(name).mul_(OUTPUT_SCALE)
    fc = draft.get_parameter("fc.weight")  # [H, 3H] by [low | middle | high]
    fc.zero_()
    fc[:, 2 * H :] = torch.eye(H)
    draft.norm.weight.copy_(head.norm)
    draft.lm_head.weight.copy_(rows.head)


OUTPUT_SCALE = 0.1
"""Scale of what attention and MLP add to the residual at the start."""
