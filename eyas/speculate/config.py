"""What the benchmark of phase 6 measures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eyas.settings import Settings


class BenchmarkConfig(Settings):
    """Phase 6: deployment of the draft and its benchmark."""

    num_draft_tokens: int = Field(default=3, ge=1, le=16, description="K: tokens drafted per verification.")
    sets: list[str] = Field(
        default_factory=lambda: ["heldout", "package:mt-bench", "package:humaneval"],
        min_length=1,
        description="Prompt sets: heldout (this run's held-out prompts), package:NAME, or file:PATH.",
    )
    prompts_per_set: int = Field(default=20, ge=1, description="Prompts per set; held-out ones are spread over the datasets.")
    max_new_tokens: int = Field(default=256, ge=2, description="Cap of one benchmark reply.")
    counting_concurrency: int = Field(
        default=16, ge=1, description="Requests in flight while replies are only counted and compared, not timed."
    )
    concurrency: list[int] = Field(
        default_factory=lambda: [1], min_length=1, description="Requests in flight per timed point; the first is the headline."
    )
    timed_prompts: int = Field(default=6, ge=1, description="Prompts per set in each timed block.")
    repeats: int = Field(default=1, ge=1, description="A-B-B-A rounds per timed point.")
    min_verifications: int = Field(
        default=2000, ge=1, description="Verifications wanted behind the accept length; fewer are said so."
    )
    accept_floor: float = Field(default=1.05, ge=1, description="Accept length below which the draft is not deployed.")
    prediction_tolerance: float = Field(
        default=0.10, gt=0, description="Largest relative gap between served and predicted accept length."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of the embedded engine in the benchmark; float32 makes every reply identical."
    )
    draft_urls: list[str] = Field(
        default_factory=list,
        description="Base URLs of SGLang servers that run with the draft, for server.kind sglang; server.urls run without it.",
    )
    hardware: Literal["blackwell", "hopper", "cpu"] = Field(
        default="blackwell", description="Where the draft will be served; chooses the flags of the written launch command."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share the target, for the written launch command.")
