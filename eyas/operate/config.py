"""Decisions and alarms of a run as a whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eyas.settings import Settings


class OperateConfig(Settings):
    """Plan, decision and watch."""

    decision: Literal["accept", "ask"] = Field(
        default="accept", description="accept goes on with the plan; ask waits for a person."
    )
    decision_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds to wait for a person.")
    decision_default: Literal["accept", "abort"] = Field(default="accept", description="What happens when nobody answers.")
    stall_s: float = Field(default=300.0, gt=0, description="Seconds without progress that count as a stall.")
