"""How responses are generated, watched and accepted."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from eyas.settings import Settings


class SamplingConfig(Settings):
    """Sampling parameters, always sent explicitly; what is left to the target comes from its generation_config.json."""

    temperature: float = Field(
        default=-1.0, ge=-1, le=5, description="Temperature, 0 for greedy; -1 takes the target's recommendation, then 1.0."
    )
    top_p: float = Field(default=0.0, ge=0, le=1, description="Nucleus; 0 takes the target's, then 1.0.")
    top_k: int = Field(default=0, ge=-1, description="Top-k, -1 for all; 0 takes the target's, then -1.")
    min_p: float = Field(default=0.0, ge=0, le=1, description="Least probability relative to the most likely token.")
    repetition_penalty: float = Field(default=1.0, gt=0, le=2, description="1.0 leaves the distribution alone.")
    stop_token_ids: list[int] = Field(default_factory=list, description="Stop tokens beside the target's end tokens.")

    @field_validator("temperature", "top_p", "top_k", mode="before")
    @classmethod
    def _left_to_the_target(cls, value: Any, info: ValidationInfo) -> Any:
        """Null is what earlier runs recorded for a value that is left to the target."""
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("temperature")
    @classmethod
    def _temperature_is_whole(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError("a temperature is 0 or more; -1 alone takes the target's")
        return value


class GateConfig(Settings):
    """Shares of suspicious replies at which a gate warns and stops."""

    warn: float = Field(ge=0, le=1, description="Share above which it warns; 1.0 never does.")
    stop: float = Field(ge=0, le=1, description="Share from which it stops the dataset; 1.0 never does.")


class GatesConfig(Settings):
    """Quality gates over the last replies of a dataset."""

    window: int = Field(default=200, ge=8, description="Replies that a rolling gate looks at.")
    min_replies: int = Field(default=16, ge=4, description="Replies before a gate may stop anything.")
    empty: GateConfig = Field(
        default=GateConfig(warn=0.02, stop=0.2), description="Replies with neither an answer nor a tool call."
    )
    cut_by_length: GateConfig = Field(default=GateConfig(warn=0.3, stop=1.0), description="Replies cut by their cap.")
    unclosed_reasoning: GateConfig = Field(
        default=GateConfig(warn=0.1, stop=0.6), description="Replies whose reasoning never closes."
    )
    no_reasoning: GateConfig = Field(
        default=GateConfig(warn=0.05, stop=0.5), description="Replies without reasoning, of a target that always reasons."
    )
    repetition: GateConfig = Field(default=GateConfig(warn=0.2, stop=1.0), description="Replies that end in a loop.")
    rejected: GateConfig = Field(default=GateConfig(warn=0.02, stop=0.3), description="Replies that were not accepted.")


class GenerationConfig(Settings):
    """Phase 2: generation of the target's own responses."""

    sampling: SamplingConfig = SamplingConfig()
    seed: int = Field(default=0, ge=0, description="Base of the per-request sampling seed.")
    canary: int = Field(default=16, ge=0, description="Replies per dataset that must pass before the long run starts.")
    max_attempts: int = Field(default=6, ge=1, description="Attempts per record before it is rejected; outages do not count.")
    dataset_floor: float = Field(
        default=0.02, ge=0, le=0.125, description="Least share of requests in flight for every unfinished dataset."
    )
    proof_prompts: int = Field(default=4, ge=0, description="Prompts per dataset whose rendering the server must confirm.")
    max_new_tokens: int = Field(default=0, ge=0, description="Cap over every dataset's own, in tokens; 0 for none.")
    min_new_tokens_room: int = Field(default=16, ge=2, description="Room in the context below which a record is rejected.")
    gates: GatesConfig = GatesConfig()
    reject_limit: float = Field(
        default=0.05, ge=0, le=1, description="Share of rejected records above which the stage exits with 3."
    )
