"""Shape and training of the draft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eyas.settings import Settings


class DraftConfig(Settings):
    """Phase 5: the draft model and its training."""

    intermediate_size: int = Field(default=0, ge=0, description="MLP width of the draft; 0 takes the target's.")
    num_unroll_steps: int = Field(default=4, ge=1, le=8, description="Steps of the training-time test.")
    step_decay: float = Field(default=0.8, gt=0, le=1, description="Loss weight of unroll step i is step_decay ** i.")
    objective: Literal["soft_ce", "overlap"] = Field(
        default="soft_ce", description="Soft cross-entropy, or the same plus the probability that a sampled draft is refused."
    )
    epochs: float = Field(default=5.0, gt=0, description="Passes over the training split.")
    max_steps: int = Field(default=0, ge=0, description="Optimizer steps; 0 follows epochs.")
    batch_tokens: int = Field(default=1024, ge=16, description="Tokens of one micro-batch, packed.")
    accumulate: int = Field(default=1, ge=1, description="Micro-batches per optimizer step.")
    num_kv_heads: int = Field(default=0, ge=0, description="Key-value heads of the draft; 0 takes the target's.")
    learning_rate: float = Field(default=5e-4, gt=0, description="Peak learning rate of AdamW.")
    min_learning_rate_share: float = Field(default=0.05, ge=0, le=1, description="Last learning rate as a share of the peak.")
    warmup_share: float = Field(default=0.05, ge=0, lt=1, description="Share of steps in which the learning rate rises.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay of matrices.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW betas.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient norm above which gradients are scaled down.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Compute precision; masters stay fp32. auto measures."
    )
    seed: int = Field(default=0, ge=0, description="Seed of initialisation and order.")
    eval_every: int = Field(default=200, ge=1, description="Optimizer steps between held-out replays.")
    eval_records: int = Field(default=128, ge=1, description="Held-out replies per replay.")
    patience: int = Field(default=0, ge=0, description="Replays without improvement after which training stops; 0 never.")
    log_every: int = Field(default=10, ge=1, description="Optimizer steps between two lines of metrics.jsonl.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Latest checkpoints kept beside the best.")
    threads: int = Field(default=0, ge=0, description="Torch threads; 0 takes every core.")
