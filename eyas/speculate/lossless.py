"""Is a reply with the draft the target's own? Each one is *identical*, a *tie*, or *wrong*.

Verifying K + 1 tokens and decoding one use different matrix shapes, so in low precision near-ties may
flip. At the first difference the target itself judges: a *tie* if its gap between the two tokens is at most
ε, the largest |Δlogit| measured between its one-token and its (K + 1)-token forwards on that prefix;
otherwise *wrong*. In fp32 all replies should be identical. A target that fits into this process is measured
here (`LocalJudge`), a larger one through its own two servers (`eyas.speculate.server_judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from eyas.target.spec import TargetSpec

_DECODED_TOKENS = 32
"""The end of a prefix that is decoded both ways; what stands before it is prefilled once for each."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one comparison; `position` is the first difference in the reply, logits in the target's units."""

    outcome: Literal["identical", "tie", "wrong"]
    position: int | None = None
    gap: float | None = None
    epsilon: float | None = None


def load_judge(spec: TargetSpec, dtype: str) -> Any:
    """The target as a `transformers` causal model in `dtype` ("float32" or "bfloat16"), independent of any engine."""
    from transformers import AutoModelForCausalLM

    # from_pretrained leaves a model in eval mode
    model: Any = AutoModelForCausalLM.from_pretrained(
        spec.folder, dtype=getattr(torch, dtype), trust_remote_code=bool(spec.remote_code_sha256), local_files_only=True
    )
    return model


def first_difference(expected: Sequence[int], seen: Sequence[int]) -> int | None:
    """Index of the first place where two replies differ, a missing token included; None if they are equal."""
    for position, (wanted, token) in enumerate(zip(expected, seen, strict=False)):
        if wanted != token:
            return position
    return None if len(expected) == len(seen) else min(len(expected), len(seen))


Measure = Callable[[list[int], list[int], tuple[int, int]], tuple[float, float]]
"""(prompt ids, common part of both replies, the two tokens that follow) → (gap, ε), each at least 0."""


def judge(measure: Measure, prompt: list[int], expected: list[int], seen: list[int]) -> Verdict:
    """Compare a greedy reply (`seen`, with the draft) with the one without (`expected`); a length that differs is wrong."""
    position = first_difference(expected, seen)
    if position is None:
        return Verdict(outcome="identical")
    if position >= min(len(expected), len(seen)):
        return Verdict(outcome="wrong", position=position)
    gap, epsilon = measure(prompt, expected[:position], (expected[position], seen[position]))
    return Verdict(outcome="tie" if gap <= epsilon else "wrong", position=position, gap=gap, epsilon=epsilon)


@dataclass(frozen=True)
class LocalJudge:
    """Measures with the target in this process, in the served precision."""

    model: Any
    num_draft_tokens: int

    @torch.inference_mode()
    def __call__(self, prompt: list[int], common: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
        """Logits after `prompt + common`: |Δ| of the two tokens, and the largest |Δ| between the two ways to decode.

        The end of `common` (32 tokens at most, in whole windows of K + 1, at least one window) is fed one by
        one and again in windows of K + 1; ε is taken over the vocabulary and the positions of the last window.
        """
        prefix, window = [*prompt, *common], self.num_draft_tokens + 1
        num_windows = max(1, min(len(common), _DECODED_TOKENS) // window)
        start = max(len(prefix) - num_windows * window, 0)
        single = _decode(self.model, prefix, start, 1)[-window:]  # [<= K+1, V]
        multiple = _decode(self.model, prefix, start, window)[-window:]
        gap = (single[-1, tokens[0]] - single[-1, tokens[1]]).abs().item()
        return gap, (single - multiple).abs().max().item()


def _decode(model: Any, prefix: Sequence[int], start: int, step: int) -> torch.Tensor:
    """Logits [len(prefix) - start, V] fp32: `prefix[:start]` in one forward, the rest `step` tokens at a time."""
    from transformers import DynamicCache

    ids = torch.tensor([list(prefix)], device=model.device)
    cache = DynamicCache(config=model.config)
    if start:
        model(input_ids=ids[:, :start], cache=cache, use_cache=True, logits_to_keep=1)
    chunks = [
        model(input_ids=ids[:, first : first + step], cache=cache, use_cache=True).logits[0].float()
        for first in range(start, len(prefix), step)
    ]
    return torch.cat(chunks)
