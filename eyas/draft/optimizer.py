"""AdamW on fp32 masters for a draft that computes in any precision, and the learning rate by step.

Compute weights are copies of the masters, refreshed after each update, so no cast happens inside a
forward pass. The schedule depends on the step alone: a slow machine trains the same draft.
"""

from __future__ import annotations

import math

import torch

from eyas.draft.config import DraftConfig
from eyas.draft.model import Draft


def learning_rate(step: int, total_steps: int, config: DraftConfig) -> float:
    """Linear warm-up over `warmup_share` of the steps, then a cosine down to `min_learning_rate_share`; `step` from 0."""
    warmup = max(1, round(config.warmup_share * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = config.min_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class MasterAdamW:
    """Owns the fp32 masters of `draft`, which it turns to `dtype`; decay applies to matrices only.

    `rate_scales` multiplies the learning rate of single parameters: Adam moves every weight by about the
    rate, so a weight whose input is large must move less.
    """

    def __init__(self, draft: Draft, config: DraftConfig, dtype: torch.dtype, rate_scales: dict[str, float]) -> None:
        self.masters = {name: value.detach().float().clone() for name, value in draft.named_parameters()}
        draft.cast(dtype)
        self.parameters = dict(draft.named_parameters())
        self.max_grad_norm = config.max_grad_norm
        groups = [
            {
                "params": [master],
                "weight_decay": config.weight_decay if master.dim() > 1 else 0.0,
                "rate_scale": rate_scales.get(name, 1.0),
            }
            for name, master in self.masters.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)

    def step(self, rate: float) -> float:
        """Apply the gradients of the compute weights, then clear them; returns their norm before clipping.

        A norm that is not finite changes nothing; the caller stops.
        """
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["rate_scale"]
            self.optimizer.step()
            self.refresh()
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the compute weights."""
        torch._foreach_copy_(list(self.parameters.values()), list(self.masters.values()))

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by `<kind>/<parameter>`; empty before the first step."""
        return {
            f"{kind}/{name}": value
            for name, master in self.masters.items()
            for kind, value in self.optimizer.state.get(master, {}).items()
        }

    @torch.no_grad()
    def load(self, masters: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
        """Continue from what `masters` and `state` gave."""
        for name, master in self.masters.items():
            master.copy_(masters[name])
            kinds = {key.partition("/")[0]: value.clone() for key, value in state.items() if key.partition("/")[2] == name}
            if kinds:
                self.optimizer.state[master] = kinds
        self.refresh()
