"""Sampling parameters of a request, and the rules that change its logits.

The keys, defaults and refusals are SGLang 0.5.23's.
Not supported and refused by name: grammars (json_schema, regex, ebnf, structural_tag) and beams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLING_KEYS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias",
    "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
_REFUSED = ("json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark", "choice", "custom_params")


class BadRequest(Exception):
    """A request that SGLang's manager refuses with 400 and `{"error": {"message": …}}`."""


class UnknownField(Exception):
    """An unknown key of `sampling_params`: 400 with `{"error": "unknown field …"}`, a string."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one reply is drawn and where it ends."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    sampling_seed: int | None = None
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        """True if the reply is the argmax at every position."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        """True if top-p, top-k or min-p cuts the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def has_logit_rules(self) -> bool:
        """True if a penalty, a bias or a minimum length changes the logits."""
        return bool(
            self.logit_bias
            or self.min_new_tokens
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1
        )


def parse_sampling(raw: Any) -> SamplingParams:
    """Read a request's `sampling_params`; raises `UnknownField` or `BadRequest` with SGLang's own words."""
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, dict):
        raise BadRequest(f"sampling_params must be an object, got {type(raw).__name__}.")
    for key in raw:
        if key not in SAMPLING_KEYS:
            raise UnknownField(f"unknown field `{key}`, expected one of " + ", ".join(f"`{name}`" for name in SAMPLING_KEYS))
    values = {key: value for key, value in raw.items() if value is not None}
    for key in _REFUSED:
        if key in values:
            raise BadRequest(f"{key} is not supported by the embedded engine.")
    for key in ("stop", "stop_regex"):
        if key in values:
            values[key] = (values[key],) if isinstance(values[key], str) else tuple(values[key])
    try:
        if "stop_token_ids" in values:
            values["stop_token_ids"] = frozenset(int(token) for token in values["stop_token_ids"])
        if "logit_bias" in values:
            values["logit_bias"] = tuple((int(token), float(bias)) for token, bias in values["logit_bias"].items())
        params = SamplingParams(**values)
        _check(params)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"sampling_params has a value of a wrong type: {error}.") from error
    return params


def _check(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise BadRequest(f"temperature must be a non-negative finite number, got {params.temperature}.")
    if not 0 < params.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {params.top_p}.")
    if not 0 <= params.min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {params.min_p}.")
    if params.top_k < -1 or params.top_k == 0:
        raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    if not -2 <= params.frequency_penalty <= 2:
        raise BadRequest(f"frequency_penalty must be in [-2, 2], got {params.frequency_penalty}.")
    if not -2 <= params.presence_penalty <= 2:
        raise BadRequest(f"presence_penalty must be in [-2, 2], got {params.presence_penalty}.")
    if not 0 < params.repetition_penalty <= 2:
        raise BadRequest(f"repetition_penalty must be in (0, 2], got {params.repetition_penalty}.")
    if params.max_new_tokens < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise BadRequest(f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}.")
    if params.n < 1:
        raise BadRequest(f"n must be at least 1, got {params.n}.")


def apply_rules(logits: Tensor, params: SamplingParams, prompt_ids: list[int], output_ids: list[int], end_ids: set[int]) -> None:
    """Change one row of `logits` [V] fp32 in place: repetition, frequency and presence penalties, bias, minimum length."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt_ids, *output_ids}))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output_ids and (params.frequency_penalty or params.presence_penalty):
        tokens, counts = torch.unique(torch.tensor(output_ids), return_counts=True)
        logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(output_ids) < params.min_new_tokens:
        logits[sorted(end_ids | params.stop_token_ids)] = -math.inf
