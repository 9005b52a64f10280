"""One reply in the making: its prompt, its parameters, its pages, its tokens, and what SGLang reports of it.

A request is owned by the engine's thread from submission to its last event; the server's thread only reads
what an event hands over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.sampling import SamplingParams

TokenLogprob = tuple[float | None, int]
"""(natural log of the probability, token id); the first prompt token has no probability."""


@dataclass(kw_only=True)
class LogprobOptions:
    """Which log-probabilities a request wants; `start` is the first prompt position, -1 for none of the prompt."""

    start: int = -1
    num_top: int = 0
    token_ids: list[int] = field(default_factory=list)
    with_text: bool = False


@dataclass(kw_only=True)
class Logprobs:
    """Log-probabilities gathered so far: of the tokens, of the `num_top` best, of the asked ids; one item a position."""

    tokens: list[TokenLogprob] = field(default_factory=list)
    top: list[list[TokenLogprob] | None] = field(default_factory=list)
    asked: list[list[TokenLogprob] | None] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Drop what stands past `length` positions."""
        del self.tokens[length:], self.top[length:], self.asked[length:]


@dataclass(kw_only=True)
class SpecCounts:
    """Raw counts of speculation: verifications, drafts proposed and accepted, and a histogram of accepted runs."""

    verifications: int = 0
    proposed: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt and its reply."""

    prompt_ids: list[int]
    params: SamplingParams
    emit: Callable[[Request], None]
    """Called in the engine's thread after every new token of a stream, and once at the end."""
    rid: str
    is_stream: bool = False
    logprob_options: LogprobOptions | None = None
    namespace: str = ""

    received_at: float = field(default_factory=time.time)
    started_at: float = 0.0
    prefilled_at: float = 0.0
    finished_at: float = 0.0

    seed: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens copied from pages of an earlier prompt."""
    num_computed: int = 0
    """Prompt tokens whose keys and values are in the cache."""
    output_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_retractions: int = 0
    finish_reason: dict[str, Any] | None = None
    input_logprobs: Logprobs = field(default_factory=Logprobs)
    output_logprobs: Logprobs = field(default_factory=Logprobs)
    spec: SpecCounts | None = None

    def __post_init__(self) -> None:
        seed = self.params.sampling_seed
        self.seed = random.getrandbits(63) if seed is None else seed

    @property
    def num_tokens(self) -> int:
        """Prompt and reply tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilled(self) -> bool:
        """True once the whole prompt is in the cache."""
        return self.num_computed == len(self.prompt_ids)

    def restart(self) -> None:
        """Forget the reply so far; the same one is made again, since every draw depends on (seed, position) alone."""
        self.num_retractions += 1
        self.num_cached = self.num_computed = 0
        self.output_ids, self.drafts = [], []
        self.input_logprobs, self.output_logprobs = Logprobs(), Logprobs()
        self.spec = None

    def count_verification(self, proposed: int, accepted: int) -> None:
        """Count one verification of `proposed` drafts, of which `accepted` are part of the reply."""
        if self.spec is None:
            self.spec = SpecCounts(histogram=[0] * (proposed + 1))
        self.spec.verifications += 1
        self.spec.proposed += proposed
        self.spec.accepted += accepted
        self.spec.histogram[accepted] += 1

    def meta_info(self) -> dict[str, Any]:
        """What SGLang 0.5.23 reports beside text and ids, with its names; times are Unix seconds, durations seconds."""
        now = time.time()
        started = self.started_at or now
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "weight_version": "default",
            "num_retractions": self.num_retractions,
            "forward_entry_time": self.started_at or None,
            "prefill_finished_time": self.prefilled_at or None,
            "queue_time": started - self.received_at,
            "reasoning_tokens": 0,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.num_cached,
            "cached_tokens_details": {"device": self.num_cached, "host": 0} if self.num_cached else None,
            "dp_rank": None,
        }
        if self.finish_reason is not None:
            finished = self.finished_at or now
            decoding = finished - self.prefilled_at
            info |= {
                "weight_versions": [{"version": "default", "start": 0, "end": len(self.output_ids)}],
                "e2e_latency": finished - self.received_at,
                "request_received_ts": self.received_at,
                "first_token_latency": (self.prefilled_at or finished) - self.received_at,
                "request_finished_ts": finished,
                "decode_throughput": len(self.output_ids) / decoding if self.prefilled_at and decoding > 0 else 0.0,
                "response_sent_to_client_ts": now,
            }
        if self.spec is not None:
            spec = self.spec
            info |= {
                "spec_verify_ct": spec.verifications,
                "spec_num_correct_drafts": spec.accepted,
                "spec_num_proposed_drafts": spec.proposed,
                "spec_correct_drafts_histogram": spec.histogram,
                "spec_accept_rate": spec.accepted / spec.proposed if spec.proposed else 0.0,
                "spec_accept_length": len(self.output_ids) / spec.verifications if spec.verifications else 0.0,
            }
        return info


def logprob_info(request: Request, text_of: Callable[[int], str]) -> dict[str, Any]:
    """The log-probability entries of a reply, `[logprob, token id, text or null]` each, under SGLang's names."""
    options = request.logprob_options
    if options is None:
        return {}

    def entry(item: TokenLogprob) -> list[Any]:
        return [item[0], item[1], text_of(item[1]) if options.with_text else None]

    def entries(items: list[list[TokenLogprob] | None]) -> list[Any]:
        return [None if item is None else [entry(pair) for pair in item] for item in items]

    info: dict[str, Any] = {
        "input_token_logprobs": [entry(item) for item in request.input_logprobs.tokens],
        "output_token_logprobs": [entry(item) for item in request.output_logprobs.tokens],
        "output_token_logprobs_length": len(request.output_logprobs.tokens),
    }
    if options.num_top:
        info["input_top_logprobs"] = entries(request.input_logprobs.top)
        info["output_top_logprobs"] = entries(request.output_logprobs.top)
    if options.token_ids:
        info["input_token_ids_logprobs"] = entries(request.input_logprobs.asked)
        info["output_token_ids_logprobs"] = entries(request.output_logprobs.asked)
    return info
