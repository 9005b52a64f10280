"""Shape and training of the draft."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyas.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class DraftConfig(Settings):
    """Phase 5: the draft model and its training."""

    baseline: str = Field(
        default="",
        description="Folder of a draft that others trained for this target: what to beat. Layouts: docs/training.md.",
    )
    warm_start: bool = Field(default=False, description="Start from the baseline, and keep its shape and vocabulary map.")
    intermediate_size: int = Field(default=0, ge=0, description="MLP width of the draft; 0 takes the target's.")
    num_unroll_steps: int = Field(default=4, ge=1, le=8, description="Steps of the training-time test.")
    step_decay: float = Field(default=0.8, gt=0, le=1, description="Loss weight of unroll step i is step_decay ** i.")
    objective: Literal["soft_ce", "overlap"] = Field(
        default="soft_ce", description="Soft cross-entropy, or the same plus the probability that a sampled draft is refused."
    )
    epochs: float = Field(default=5.0, gt=0, description="Passes over the training split.")
    max_steps: int = Field(default=0, ge=0, description="Optimizer steps; 0 follows epochs.")
    batch_tokens: int = Field(default=1024, ge=16, description="Tokens of one micro-batch, packed.")
    accumulate: int = Field(default=1, ge=1, description="Micro-batches per optimizer step, over all processes.")
    num_kv_heads: int = Field(default=0, ge=0, description="Key-value heads of the draft; 0 takes the target's.")
    learning_rate: float = Field(default=5e-4, gt=0, description="Peak learning rate of AdamW.")
    min_learning_rate_share: float = Field(default=0.05, ge=0, le=1, description="Last learning rate as a share of the peak.")
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="Share of steps in which the learning rate rises.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay of matrices.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW betas.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient norm above which gradients are scaled down.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Compute precision; masters stay fp32. auto: bf16 where the processor multiplies it in hardware.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of initialisation and order.")
    eval_every: int = Field(default=200, ge=1, description="Optimizer steps between held-out replays.")
    eval_records: int = Field(default=128, ge=1, description="Held-out replies per replay.")
    patience: int = Field(default=0, ge=0, description="Replays without improvement after which training stops; 0 never.")
    log_every: int = Field(default=10, ge=1, description="Optimizer steps between two lines of metrics.jsonl.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Latest checkpoints kept beside the best.")
    threads: int = Field(default=0, ge=0, description="Torch threads of a process; 0 shares every core among the processes.")
    recompute: bool = Field(default=False, description="Compute each unroll step again in the backward pass instead of keeping it.")
    processes: int = Field(default=1, ge=1, description="Training processes on each host, one for each GPU.")
    hosts: int = Field(default=1, ge=1, description="Hosts that train together; each runs `python -m eyas.draft.train --run DIR`.")
    rendezvous: str = Field(default="", description="host:port at which several hosts meet, on the first of them.")
    zero_stage: int = Field(  # no Literal: Prefect's form shows a choice of 0 as an empty one
        default=0,
        ge=0,
        le=3,
        description="What DeepSpeed divides among processes: 0 nothing (plain torch), 1 optimizer state, 2 gradients, 3 weights.",
    )
    tensorboard: bool = Field(default=False, description="Also write the metrics to draft/tensorboard.")
    wandb_project: str = Field(default="", description="Also send the metrics to this project of Weights & Biases; empty does not.")

    @model_validator(mode="after")
    def _processes_have_work(self) -> DraftConfig:
        if self.accumulate < self.processes * self.hosts:
            raise ValueError(
                f"accumulate is {self.accumulate}, wanted at least {self.processes * self.hosts}: one micro-batch for each of "
                f"{self.processes} processes on {self.hosts} hosts"
            )
        if self.hosts > 1 and not self.rendezvous:
            raise ValueError(f"hosts is {self.hosts} and rendezvous is empty; name host:port of the first host")
        return self
