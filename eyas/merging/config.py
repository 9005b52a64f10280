"""How datasets become one training order."""

from __future__ import annotations

from pydantic import Field

from eyas.settings import Settings


class MergingConfig(Settings):
    """Phase 3: merge, shuffle, vocabulary map."""

    seed: int = Field(default=0, ge=0, description="Seed of the shuffle.")
    max_tokens: int = Field(default=4096, ge=8, description="Longest record, prompt included; longer ones are cut at the end.")
    mixture: dict[str, float] = Field(default_factory=dict, description="Weight per dataset (1.0 = once per epoch).")
    draft_vocab_size: int = Field(default=8192, ge=8, description="Tokens the draft can propose.")
    memory_bytes: int = Field(default=256 << 20, ge=1 << 20, description="Memory bound of the shuffle; does not change the result.")
