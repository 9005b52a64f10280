"""What the benchmark of phase 6 measures."""

from __future__ import annotations

from pydantic import Field

from eyas.settings import Settings


class BenchmarkConfig(Settings):
    """Phase 6: deployment of the draft and its benchmark."""

    num_draft_tokens: int = Field(default=3, ge=1, le=16, description="K: tokens drafted per verification.")
    sets: list[str] = Field(
        default_factory=lambda: ["heldout", "package:mt-bench", "package:humaneval"],
        description="Prompt sets: heldout (this run's held-out prompts), package:NAME, or file:PATH.",
    )
    prompts_per_set: int = Field(default=20, ge=1, description="Prompts per set; held-out ones are spread over the datasets.")
    max_new_tokens: int = Field(default=256, ge=2, description="Cap of one benchmark reply.")
    concurrency: list[int] = Field(default_factory=lambda: [1], min_length=1, description="Requests in flight per measured point.")
    repeats: int = Field(default=1, ge=1, description="A-B-B-A blocks per point.")
    min_verifications: int = Field(
        default=2000, ge=1, description="Verifications wanted behind the accept length; fewer are said so."
    )
    accept_floor: float = Field(default=1.05, ge=1, description="Accept length below which the draft is not deployed.")
    prediction_tolerance: float = Field(
        default=0.10, gt=0, description="Largest relative gap between served and predicted accept length."
    )
    dtype: str = Field(
        default="auto", description="Precision of the embedded engine in the benchmark; float32 makes every reply identical."
    )
