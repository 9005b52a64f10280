"""Ties of a target too large for this process, measured through its own two servers.

Both servers repeat the request up to the first difference and report log-probabilities: the one without
draft decoded that position with a one-token forward, the one with the draft with a (K + 1)-token forward.
Differences of log-probabilities are differences of logits, up to one constant that is the same for all tokens.
A reply made at another load may itself hold a flipped tie, which a server on its own does not repeat; then less
and less of the common part is decoded again, and the rest is given as prompt.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from typing import Any

from eyas.errors import ServerError
from eyas.sglang.client import SGLangClient
from eyas.speculate.config import DraftShape
from eyas.speculate.load import Server
from eyas.speculate.results import Side
from eyas.speculate.servers import Servers

_TOP = 20
SIDES: tuple[Side, ...] = ("off", "on")


_DECODED = (1 << 30, 16, 4, 1)
"""Tokens of the common part that are decoded again: all of them, or the last few."""


Tie = tuple[tuple[int, ...], tuple[int, ...]]
"""(prompt ids, common part of both replies)."""


class ServerJudge:
    """Measures with the server without draft and the one with it in `shape`; first all of one side, then all of the other."""

    def __init__(self, servers: Servers, shape: DraftShape) -> None:
        self._servers, self._shape = servers, shape
        self._wanted: list[Tie] = []
        self._seen: dict[tuple[Side, Tie], list[dict[int, float] | None]] = {}

    def note(self, prompt: list[int], common: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
        """Remember a place that will be asked for; gives (0, 0), which judges nothing."""
        self._wanted.append((tuple(prompt), tuple(common)))
        return 0.0, 0.0

    def ask(self) -> None:
        """Ask both sides for what was noted: two changes of the host at most, however many ties there are."""
        for side in SIDES:
            for tie in dict.fromkeys(self._wanted):
                if (side, tie) not in self._seen:
                    self._seen[side, tie] = self._answers(side, *tie)

    def __call__(self, prompt: list[int], common: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
        """(gap, ε) after `prompt + common`: over the 20 likeliest tokens of either server at that position.

        A token outside the 20 likeliest is infinitely far away, and so are both where the servers repeat `common` in no
        way: nothing was measured, so nothing is excused.
        """
        self.note(prompt, common, tokens)
        self.ask()
        off, on = (self._seen[side, (tuple(prompt), tuple(common))] for side in SIDES)
        for single, multiple in zip(off, on, strict=True):
            if single is None or multiple is None:
                continue
            if not single.keys() >= set(tokens):
                break
            epsilon = max((abs(single[token] - multiple[token]) for token in single.keys() & multiple.keys()), default=0.0)
            return abs(single[tokens[0]] - single[tokens[1]]), epsilon
        return math.inf, 0.0

    def _answers(self, side: Side, prompt: tuple[int, ...], common: tuple[int, ...]) -> list[dict[int, float] | None]:
        server = self._servers.get(side, self._shape)
        places = dict.fromkeys(max(len(common) - decoded, 0) for decoded in _DECODED)
        return [asyncio.run(_top_logprobs(server, [*prompt, *common[:place]], list(common[place:]))) for place in places]


async def gap_of(server: Server, ids: list[int], tokens: tuple[int, int]) -> float:
    """|Δ| of the log-probabilities of two tokens after `ids` on one server; infinite where one is not among the 20 likeliest."""
    seen = await _top_logprobs(server, ids, [])
    return abs(seen[tokens[0]] - seen[tokens[1]]) if seen is not None and seen.keys() >= set(tokens) else math.inf


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
