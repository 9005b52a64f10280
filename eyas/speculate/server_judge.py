"""Ties of a target too large for this process, measured through its own two servers.

Both servers repeat the request up to the first difference and report log-probabilities: the one without
draft decoded that position with a one-token forward, the one with the draft with a (K + 1)-token forward.
Differences of log-probabilities are differences of logits, up to one constant that is the same for all tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from dataclasses import dataclass
from typing import Any

from eyas.errors import ServerError
from eyas.sglang.client import SGLangClient
from eyas.speculate.load import Server

_TOP = 20


@dataclass(frozen=True)
class ServerJudge:
    """Measures with the server without draft (`off`) and the one with it (`on`)."""

    off: Server
    on: Server

    def __call__(self, prompt: list[int], common: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
        """(gap, ε) after `prompt + common`: over the 20 likeliest tokens of either server at that position.

        A token outside the 20 likeliest is infinitely far away, and so are both where a server no longer repeats
        `common`: nothing was measured, so nothing is excused.
        """
        single, multiple = (asyncio.run(_top_logprobs(server, prompt, common)) for server in (self.off, self.on))
        if single is None or multiple is None or not single.keys() >= set(tokens):
            return math.inf, 0.0
        shared = single.keys() & multiple.keys()
        epsilon = max((abs(single[token] - multiple[token]) for token in shared), default=0.0)
        return abs(single[tokens[0]] - single[tokens[1]]), epsilon


async def _top_logprobs(server: Server, prompt: list[int], common: list[int]) -> dict[int, float] | None:
    """Log-probability by token at the position after `common`; None if the server decodes another way there."""
    rid = f"judge-{uuid.uuid4().hex}"
    payload: dict[str, Any] = {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": len(common) + 1, "stop_token_ids": list(server.stop_token_ids)},
        "return_logprob": True,
        "top_logprobs_num": _TOP,
    }
    deadline_s = server.config.deadline_floor_s + (len(common) + 1) / server.config.min_tokens_per_s
    async with SGLangClient(server.url, server.config, api_key=server.api_key) as client:
        body = await client.generate_raw(payload, rid=rid, deadline_s=deadline_s)
    try:
        value = json.loads(body)
        if value["output_ids"][: len(common)] != common:
            return None
        return {int(token): float(logprob) for logprob, token, *_ in value["meta_info"]["output_top_logprobs"][len(common)]}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ServerError(f"{server.url}/generate rid={rid} gave no top log-probabilities ({error!r}); wanted SGLang") from error
