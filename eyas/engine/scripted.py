"""Scripted reasoning: replies of the form `<think>…</think> answer`, for tests of the reasoning path.

No model runs. The small packaged target knows no think tokens, so a pipeline test that needs reasoning talks to
this; `/server_info` says `"scripted_reasoning": true`. A reply is a function of the prompt ids alone.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable

from eyas.engine.request import Request

_THOUGHTS = (
    "The user wants an answer. First I restate the question, then I check what is given.",
    "Let me go step by step and look at each part in turn.",
    "There may be more than one reading; the plain one is meant here.",
    "I compare the parts, and nothing contradicts the first idea.",
    "That settles it, so I write the result down briefly.",
)
_ANSWERS = ("The answer is {number}.", "In short: {number}, by the steps above.", "It comes to {number}; nothing else fits.")


class ScriptedRunner:
    """Gives out a scripted reply token by token; has no cache, so pages are never short."""

    tokens_per_step = 1
    num_drafts = 0
    num_pages = 1 << 20

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], end_id: int) -> None:
        self._encode, self._decode, self._end_id = encode, decode, end_id

    def page_keys(self, request: Request) -> list[bytes]:
        """None: nothing is cached."""
        return []

    def first_unknown(self, keys: list[bytes]) -> bytes | None:
        """None: nothing is cached."""
        return None

    def reuse_prefix(self, request: Request, count: int) -> None:
        """Nothing to take."""

    def take_pages(self, count: int) -> list[int] | None:
        """No page is needed."""
        return []

    def give_back(self, pages: list[int]) -> None:
        """Nothing to return."""

    def num_free_pages(self) -> int:
        """Always enough."""
        return self.num_pages

    def forget_prefixes(self) -> None:
        """Nothing is remembered."""

    def step(self, decoding: list[Request], pieces: list[tuple[Request, int]]) -> list[tuple[Request, list[int]]]:
        """The next scripted token of every request whose prompt is taken in."""
        ready = list(decoding)
        for request, count in pieces:
            request.num_computed += count
            if request.is_prefilled:
                ready.append(request)
        return [(request, [self._token(request)]) for request in ready]

    def _token(self, request: Request) -> int:
        script = self.script(request.prompt_ids)
        place = len(request.output_ids)
        return script[place] if place < len(script) else self._end_id

    def script(self, prompt_ids: list[int]) -> list[int]:
        """The whole reply to `prompt_ids`; it starts inside the think block if the prompt ends there."""
        number = zlib.crc32(array("q", prompt_ids).tobytes())
        opens = "" if self._decode(prompt_ids[-8:]).rstrip().endswith("<think>") else "<think>\n"
        thoughts = " ".join(_THOUGHTS[(number >> shift) % len(_THOUGHTS)] for shift in range(1 + number % 6))
        answer = _ANSWERS[number % len(_ANSWERS)].format(number=number % 1000)
        return [*self._encode(f"{opens}{thoughts}\n</think>\n\n{answer}"), self._end_id]
