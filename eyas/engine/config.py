"""Settings of the embedded target server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eyas.settings import Settings

MOST_RUNNING = 512


class EngineConfig(Settings):
    """The embedded engine: one process, one model, a CPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of weights and cache; auto: bf16 where the processor multiplies it in hardware."
    )
    max_running_requests: int = Field(default=64, ge=1, le=MOST_RUNNING, description="Requests decoded together.")
    max_queued_requests: int = Field(
        default=0, ge=0, description="Requests that may wait; one more is answered 503. 0 lets any number wait, as SGLang does."
    )
    max_total_tokens: int = Field(default=0, ge=0, description="Tokens the KV cache holds; 0 derives it from memory.")
    prefill_chunk_tokens: int = Field(
        default=512, ge=64, multiple_of=64, description="Prompt tokens computed beside one decoding step."
    )
    threads: int = Field(default=0, ge=0, description="Torch threads; 0 takes every core.")
    port: int = Field(default=0, ge=0, le=65535, description="Port on loopback; 0 takes a free one.")
