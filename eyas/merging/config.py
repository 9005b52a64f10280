"""How datasets become one training order."""

from __future__ import annotations

from pydantic import Field, field_validator

from eyas.settings import Settings


class MergingConfig(Settings):
    """Phase 3: merge, shuffle, vocabulary map."""

    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    max_tokens: int = Field(default=4096, ge=8, description="Longest record, prompt included; longer ones are cut at the end.")
    mixture: dict[str, float] = Field(
        default_factory=dict, description='Weight per dataset (1.0 = once per epoch): `{"B1_glaive": 0.5}`.'
    )
    draft_vocab_size: int = Field(default=8192, ge=8, description="Tokens the draft can propose.")
    memory_bytes: int = Field(default=256 << 20, ge=1 << 20, description="Memory bound of the shuffle; does not change the result.")
    workers: int = Field(
        default=0, ge=0, le=256, description="Processes that check records; 0 takes every core; does not change the result."
    )
    max_line_bytes: int = Field(
        default=64 << 20, ge=1 << 10, description="Longest line of a response file; a longer one is a reject."
    )
    reject_limit: float = Field(
        default=0.02, ge=0, le=1, description="Share of rejected records above which the stage exits with 3."
    )

    @field_validator("mixture")
    @classmethod
    def _weights_are_not_negative(cls, mixture: dict[str, float]) -> dict[str, float]:
        for name, weight in mixture.items():
            if not 0 <= weight <= 100:
                raise ValueError(f"weight of {name} is {weight}, wanted 0 to 100")
        return mixture
