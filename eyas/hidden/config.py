"""How hidden states are extracted and stored."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eyas.hidden.codec import CodecName
from eyas.settings import ServerUrl, Settings


class HiddenConfig(Settings):
    """Phase 4: source, codec and shape of the hidden-state store."""

    source: Literal["transformers", "sglang", "vllm"] = Field(
        default="transformers",
        description="Who computes the states: transformers here, the SGLang servers of server.urls in aux mode, or vLLM servers.",
    )
    urls: list[ServerUrl] = Field(
        default_factory=list,
        description="SGLang servers in aux mode beside those of server.urls, which go on generating (empty takes server.urls); "
        "or the servers of the vllm source.",
    )
    sink: str = Field(
        default="",
        description="Folder that our plugin in SGLang, or vLLM's connector, writes states to; empty takes SGLang's plain HTTP.",
    )
    final_urls: list[ServerUrl] = Field(
        default_factory=list, description="Without a sink: SGLang servers that give final states (one server gives aux or final)."
    )
    concurrency: int = Field(default=8, ge=1, description="Requests in flight of the sglang and vllm sources.")
    codec: CodecName = Field(
        default="bf16",
        description="How states are stored: bf16 exactly, fp8, int4 (the final state in fp8), or int4_top (the target as top-k "
        "probabilities of the draft vocabulary, after the merge).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of the forward pass of the transformers source."
    )
    shard_bytes: int = Field(default=256 << 20, ge=1 << 20, description="Wanted size of one shard, in bytes.")
    batch_tokens: int = Field(default=4096, ge=16, description="Tokens of one forward pass.")
    disk_budget: int = Field(
        default=0,
        ge=0,
        description="Bytes that hidden states may take: training then extracts its records in every epoch anew, a window of "
        "shards ahead of itself, and only held-out states stay. 0 stores everything once.",
    )
    disk_reserve_bytes: int = Field(default=1 << 30, ge=0, description="Bytes that must stay free on the disk.")
    probe_records: int = Field(default=64, ge=0, description="Replies on which the source is proven before it runs.")
    min_greedy_agreement: float = Field(
        default=0.99, ge=0, le=1, description="Share of probe tokens that lm_head must reproduce, ties aside."
    )
    reject_limit: float = Field(
        default=0.02, ge=0, le=1, description="Share of records without states above which the stage exits with 3."
    )
    threads: int = Field(default=0, ge=0, description="Torch threads; 0 takes every core, or half of them beside a trainer.")
