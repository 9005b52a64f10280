"""The optimizer of `optimizer.py` with DeepSpeed's ZeRO: its state, gradients or weights are divided among processes.

Same interface, same update, same checkpoints: what is saved is gathered into whole tensors by name, so a
training continues with another number of processes, another stage, or without DeepSpeed. DeepSpeed averages
gradients over processes where the loss is already divided by global counts, so the loss is multiplied back.
Stage 3 gathers the draft's one layer as a whole when a pass begins; it needs no order of submodules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eyas.draft.config import DraftConfig
from eyas.draft.loss import LossResult
from eyas.draft.model import Draft
from eyas.draft.optimizer import num_micro_steps, parameter_groups
from eyas.draft.world import World
from eyas.errors import ConfigError

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroAdamW:
    """AdamW of `draft` divided among the processes of `world` by `config.zero_stage`."""

    wants_equal_steps = True
    """Gradients are exchanged as the backward pass makes them: every process must make the same ones, in one order."""

    def __init__(self, draft: Draft, config: DraftConfig, dtype: torch.dtype, rate_scales: dict[str, float], world: World) -> None:
        deepspeed = _deepspeed()
        self.draft, self.world, self.zero = draft, world, deepspeed.zero
        masters = {name: value.detach().float().clone() for name, value in draft.named_parameters()}
        draft.cast(dtype)
        self.num_run = 0
        self.call = _Call(draft)
        groups = parameter_groups(dict(draft.named_parameters()), config, rate_scales)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.call,
            optimizer=torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": num_micro_steps(config, world),
                "gradient_clipping": config.max_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": config.zero_stage},
                "bf16": {"enabled": dtype == torch.bfloat16},
                "steps_per_print": 1 << 40,
            },
        )
        if config.zero_stage == 3:  # weights are read outside their own modules' forward passes
            for parameter in draft.parameters():
                deepspeed.zero.register_external_parameter(self.call, parameter)
        self.utils = deepspeed.utils
        self._make_moments()
        self.load(masters, {})

    def run(self, compute: Callable[[], LossResult]) -> LossResult:
        """The loss of one micro-batch, and its gradients."""
        if self.num_run:
            self.engine.step()  # counts the micro-batch before; the last one's is called by `step`
        loss = self.engine(compute)
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        self.num_run += 1
        assert self.call.result is not None
        return self.call.result

    def step(self, rate: float) -> float:
        """Apply the gradients of all micro-batches; returns their norm before clipping."""
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = rate * group["rate_scale"]
        self.engine.step()
        self.num_run = 0
        norm = self.engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Weights are whole on every process while the block runs (stage 3 divides them)."""
        with self.zero.GatheredParameters(list(self.draft.parameters())):
            yield

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Whole fp32 masters and moments by name, on the CPU of the first process (empty on the others)."""
        masters: dict[str, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        num_steps = next(iter(self.optimizer.optimizer.state.values()))["step"]
        for name, parameter in self.draft.named_parameters():
            whole = {"": self.utils.safe_get_full_fp32_param(parameter)}
            whole |= {kind: self.utils.safe_get_full_optimizer_state(parameter, kind) for kind in _MOMENTS}
            if self.world.is_first:
                shape = self.draft.spec.tensor_shapes[name]
                masters[name] = whole[""].reshape(shape).cpu()
                state |= {f"{kind}/{name}": whole[kind].reshape(shape).cpu() for kind in _MOMENTS}
                state[f"step/{name}"] = torch.as_tensor(num_steps, dtype=torch.float32).cpu().clone()
        return masters, state

    @torch.no_grad()
    def load(self, masters: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
        """Continue from what `snapshot` gave, here or in `MasterAdamW`; an empty `state` is that before the first step."""
        num_steps = float(next((value for key, value in state.items() if key.startswith("step/")), torch.zeros(())))
        for moments in self.optimizer.optimizer.state.values():
            moments["step"].fill_(num_steps)
        for name, parameter in self.draft.named_parameters():
            master = masters[name].to(self.world.device)
            with self.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(master)
            self.utils.safe_set_full_fp32_param(parameter, master)
            for kind in _MOMENTS:
                if f"{kind}/{name}" in state:
                    self.utils.safe_set_full_optimizer_state(parameter, state[f"{kind}/{name}"].to(self.world.device), kind)

    def _make_moments(self) -> None:
        """Torch makes moments in the first step only, and a resumed training fills them before it."""
        stage_3 = getattr(self.optimizer, "fp32_partitioned_groups_flat", None)
        for flat in stage_3 or self.optimizer.single_partition_of_fp32_groups:
            moments = {kind: torch.zeros_like(flat) for kind in _MOMENTS}
            self.optimizer.optimizer.state[flat] = {"step": torch.zeros(()), **moments}
        if stage_3 is None:  # stages 1 and 2 keep views of the moments by weight
            self.optimizer._lazy_init_hp_params_optimizer_state()


class _Call(nn.Module):
    """What DeepSpeed takes for the model: any computation on the draft's weights."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft
        self.result: LossResult | None = None

    def forward(self, compute: Callable[[], LossResult]) -> torch.Tensor:
        self.result = compute()
        return self.result.loss


def _deepspeed() -> Any:
    """DeepSpeed, ready to use; raises `ConfigError` where it is not installed."""
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(
            f"draft.zero_stage wants DeepSpeed, which is not installed ({error}); pip install 'eyas[train]', or set zero_stage to 0"
        ) from error
    # Reduction through shared memory among CPU processes compiles itself for minutes, and an interrupted build leaves a lock on
    # which the next run waits for ever. Gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    return deepspeed
