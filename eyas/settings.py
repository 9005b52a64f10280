"""The base of every config model: unknown keys are refused, values are frozen, defaults are checked."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of the config tree; each stage owns its own subclass beside the code that reads it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
