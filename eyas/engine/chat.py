"""`/v1/chat/completions`, as far as the render proof needs it: messages and tools through the tokenizer's own template.

The ids that a server makes of messages are what a client compares with its own (`max_tokens` 1 and
`return_prompt_token_ids`). No tool parser, no reasoning parser, no streaming.
"""

from __future__ import annotations

import time
from typing import Any

from eyas.engine.protocol import GenerateBody, Item
from eyas.engine.sampling import BadRequest, SamplingParams, parse_sampling
from eyas.engine.service import Service

_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
                   "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias")  # fmt: skip


async def complete_chat(service: Service, raw: dict[str, Any]) -> dict[str, Any]:
    """The answer to one chat request; raises `BadRequest`."""
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list.")
    if raw.get("stream"):
        raise BadRequest("stream is not supported by the embedded engine's chat endpoint; use /generate.")
    prompt_ids = _render(service, raw, messages)
    params = _params(service, raw, len(prompt_ids))
    item = Item(prompt=prompt_ids, params=params, rid=raw.get("rid"), logprobs=None, namespace="")
    [reply] = await service.reply([item], GenerateBody())
    meta = reply["meta_info"]
    reason = meta["finish_reason"]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": reply["text"], "reasoning_content": None, "tool_calls": None},
        "logprobs": None,
        "finish_reason": reason["type"],
        "matched_stop": reason.get("matched"),
    }
    if raw.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = prompt_ids
    if raw.get("return_token_ids"):
        choice["response_token_ids"] = reply["output_ids"]
    if raw.get("return_meta_info"):
        choice["meta_info"] = meta
    return {
        "id": meta["id"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": raw.get("model", service.served_model),
        "choices": [choice],
        "usage": {
            "prompt_tokens": meta["prompt_tokens"],
            "total_tokens": meta["prompt_tokens"] + meta["completion_tokens"],
            "completion_tokens": meta["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {"weight_version": "default", "weight_versions": meta.get("weight_versions", [])},
    }


def _render(service: Service, raw: dict[str, Any], messages: list[Any]) -> list[int]:
    try:
        ids = service.tokenizer.apply_chat_template(
            messages,
            tools=raw.get("tools") or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(raw.get("chat_template_kwargs") or {}),
        )
    except Exception as error:  # a template may raise anything; the request is what is wrong
        raise BadRequest(f"the chat template refused the messages: {error}") from error
    return list(ids)


def _params(service: Service, raw: dict[str, Any], num_prompt: int) -> SamplingParams:
    defaults = {key: value for key, value in service.spec.generation_defaults.items() if key in ("temperature", "top_p", "top_k")}
    given = {key: raw[key] for key in _SAMPLING_NAMES if raw.get(key) is not None}
    limit = raw.get("max_completion_tokens") or raw.get("max_tokens")
    if limit is None:
        limit = max(0, service.spec.context_length - num_prompt)
    return parse_sampling({**defaults, **given, "max_new_tokens": limit, "sampling_seed": raw.get("seed")})
