"""What the benchmark of phase 6 measures."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyas.settings import ServerUrl, Settings


class DraftShape(Settings):
    """How an engine drafts: a chain (top-k 1), or on SGLang a tree; hashable, so that results can be kept by it."""

    num_steps: int = Field(ge=1, le=16, description="Steps of the draft per verification: K of a chain, the depth of a tree.")
    top_k: int = Field(default=1, ge=1, le=32, description="Branches per step; above 1 SGLang drafts a tree.")
    num_verified: int = Field(
        default=0, ge=0, le=256, description="Tokens verified at once; 0 gives num_steps + 1, which is all that a chain can have."
    )

    @model_validator(mode="after")
    def _tokens_fit(self) -> DraftShape:
        if self.top_k == 1 and self.num_verified not in (0, self.num_steps + 1):
            raise ValueError(
                f"num_verified is {self.num_verified}, a chain of {self.num_steps} verifies {self.num_steps + 1}; leave it out"
            )
        if self.top_k > 1 and self.num_verified <= self.num_steps:
            raise ValueError(
                f"num_verified is {self.num_verified}, a tree wants more than its depth of {self.num_steps}; give its tokens"
            )
        return self

    @property
    def verified(self) -> int:
        """Tokens verified at once, the last accepted one included."""
        return self.num_verified or self.num_steps + 1

    def __str__(self) -> str:
        return f"K={self.num_steps}" if self.top_k == 1 else f"K={self.num_steps} top-k={self.top_k} tokens={self.verified}"


class BenchmarkConfig(Settings):
    """Phase 6: deployment of the draft and its benchmark."""

    num_draft_tokens: int = Field(default=3, ge=1, le=16, description="K: tokens drafted per verification.")
    sets: list[str] = Field(
        default_factory=lambda: ["heldout", "mt-bench", "humaneval"],
        min_length=1,
        description="Prompt sets: heldout (this run's held-out prompts), a standard set by its name (mt-bench, humaneval, bfcl, "
        "gsm8k, math-500, mbpp), package:NAME, hub:ID,SUBSET,SPLIT, or file:PATH (one's own traffic).",
    )
    prompts_per_set: int = Field(default=20, ge=1, description="Prompts per set; held-out ones are spread over the datasets.")
    max_new_tokens: int = Field(default=256, ge=2, description="Cap of one benchmark reply.")
    counting_concurrency: int = Field(
        default=16, ge=1, description="Requests in flight while replies are only counted and compared, not timed."
    )
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [1], min_length=1, description="Requests in flight per timed point; the first is the headline."
    )
    timed_prompts: int = Field(default=6, ge=1, description="Prompts per set in each timed block.")
    repeats: int = Field(default=1, ge=1, description="A-B-B-A rounds per timed point.")
    grid: list[DraftShape] = Field(
        default_factory=list, description="Further shapes of the draft, each counted and timed against the target without draft."
    )
    sampled_replies: int = Field(
        default=0,
        ge=0,
        description="Replies per side and prompt drawn at temperature 1 to compare their distributions; 0 leaves the test out.",
    )
    sampled_prompts: int = Field(default=4, ge=1, description="Prompts of the first set that are sampled so.")
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
    draft_urls: list[ServerUrl] = Field(
        default_factory=list,
        description="URL of an SGLang server with the draft, beside server.urls without it; empty restarts one host for each.",
    )
    hardware: Literal["blackwell", "hopper", "cpu"] = Field(
        default="blackwell", description="Where the draft will be served; chooses the flags of the written launch command."
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share the target, for the written launch command.")

    @property
    def shape(self) -> DraftShape:
        """The headline's chain."""
        return DraftShape(num_steps=self.num_draft_tokens)

    @property
    def shapes(self) -> list[DraftShape]:
        """The headline's shape first, then the grid's others."""
        return [self.shape, *(shape for shape in self.grid if shape != self.shape)]

    @property
    def most_in_flight(self) -> int:
        """Requests that a server must run at once, with the draft as without."""
        return max(self.counting_concurrency, *self.concurrency)

    @model_validator(mode="after")
    def _grid_has_no_doubles(self) -> BenchmarkConfig:
        names = [str(shape) for shape in self.grid]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"benchmark.grid holds {', '.join(doubled)} twice; leave one out")
        return self
