"""AdamW on fp32 masters for a draft that computes in any precision, and the learning rate by step.

Compute weights are copies of the masters, refreshed after each update, so no cast happens inside a
forward pass. Gradients of several micro-batches and processes are added in fp32. The schedule depends on the
step alone: a slow machine trains the same draft. `zero.py` is the same with DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from eyas.draft.config import DraftConfig
from eyas.draft.loss import LossResult
from eyas.draft.model import Draft
from eyas.draft.world import World


def learning_rate(step: int, total_steps: int, config: DraftConfig) -> float:
    """Linear warm-up over `warmup_share` of the steps, then a cosine down to `min_learning_rate_share`; `step` from 0."""
    warmup = max(1, round(config.warmup_share * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    floor = config.min_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def parameter_groups(
    parameters: Mapping[str, torch.Tensor], config: DraftConfig, rate_scales: dict[str, float]
) -> list[dict[str, Any]]:
    """Groups of one decay and one scale of the rate each; decay applies to matrices only."""
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        decay = config.weight_decay if parameter.dim() > 1 else 0.0
        groups.setdefault((decay, rate_scales.get(name, 1.0)), []).append(parameter)
    return [{"params": found, "weight_decay": decay, "rate_scale": scale} for (decay, scale), found in groups.items()]


def num_micro_steps(config: DraftConfig, world: World) -> int:
    """The most micro-batches of one process in an optimizer step."""
    return -(-config.accumulate // world.size)


class MasterAdamW:
    """Owns the fp32 masters of `draft`, which it turns to `dtype`, on every process of `world` alike.

    `rate_scales` multiplies the learning rate of single parameters: Adam moves every weight by about the
    rate, so a weight whose input is large must move less.
    """

    wants_equal_steps = False
    """Gradients are exchanged once all are made: a process without a batch just has none."""

    def __init__(
        self, draft: Draft, config: DraftConfig, dtype: torch.dtype, rate_scales: dict[str, float], world: World | None = None
    ) -> None:
        self.world = world or World()
        self.masters = {name: value.detach().float().clone() for name, value in draft.named_parameters()}
        draft.cast(dtype)
        self.parameters = dict(draft.named_parameters())
        self.max_grad_norm = config.max_grad_norm
        groups = parameter_groups(self.masters, config, rate_scales)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)

    def run(self, compute: Callable[[], LossResult]) -> LossResult:
        """The loss of one micro-batch, its gradients added to the masters'."""
        result = compute()
        torch.autograd.backward(result.loss)
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None
        return result

    def step(self, rate: float) -> float:
        """Apply the gradients of all micro-batches, then clear them; returns their norm before clipping.

        A norm that is not finite changes nothing; the caller stops.
        """
        for master in self.masters.values():
            master.grad = self.world.sum(torch.zeros_like(master) if master.grad is None else master.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["rate_scale"]
            self.optimizer.step()
            self.refresh()
        self.optimizer.zero_grad()
        return norm

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Weights are whole while the block runs; here they always are."""
        yield

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the compute weights."""
        torch._foreach_copy_(list(self.parameters.values()), list(self.masters.values()))

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Masters by name; moments and step counts by `<kind>/<name>`, none before the first step."""
        state = {
            f"{kind}/{name}": value
            for name, master in self.masters.items()
            for kind, value in self.optimizer.state.get(master, {}).items()
        }
        return self.masters, state

    @torch.no_grad()
    def load(self, masters: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
        """Continue from what `snapshot` gave, here or in `ZeroAdamW`."""
        for name, master in self.masters.items():
            master.copy_(masters[name])
            kinds = {
                key.partition("/")[0]: value.to(master.device, copy=True)
                for key, value in state.items()
                if key.partition("/")[2] == name
            }
            if kinds:
                self.optimizer.state[master] = kinds
        self.refresh()
