"""Quality gates: shares of suspicious replies over the last ones of a dataset, each with a warn and a stop level.

A stop ends that dataset only; everything it has made is kept. Counting costs microseconds; the search for
repetition costs 0.1 ms per 1,000 tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import GateError
from eyas.generation.config import GateConfig, GatesConfig
from eyas.target.reasoning import ReasoningFormat, Spans

LOOP_REPEATS = 8
LOOP_TAIL = 1024
LONGEST_LOOP = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What the gates look at in one outcome; each is True where it is suspicious."""

    empty: bool = False
    cut_by_length: bool = False
    unclosed_reasoning: bool = False
    no_reasoning: bool = False
    repetition: bool = False
    rejected: bool = False


NAMES = ("empty", "cut_by_length", "unclosed_reasoning", "no_reasoning", "repetition", "rejected")
ADVICE = {
    "empty": "the target answers nothing: check stop_token_ids and the chat template",
    "cut_by_length": "raise the datasets' max_new_tokens, or accept it with generation.gates.cut_by_length",
    "unclosed_reasoning": "raise max_new_tokens, or set target.reasoning to the target's real format",
    "no_reasoning": (
        "set target.reasoning to the target's real format, give target.chat_template_kwargs that turn thinking on, or state "
        "target.always_reasons: no if this target may answer without reasoning"
    ),
    "repetition": "raise temperature or repetition_penalty in generation.sampling, or accept it with generation.gates.repetition",
    "rejected": "read rejects.jsonl: its reasons say what the server or the prompts do wrong",
}


def marks_of(output_ids: Sequence[int], spans: Spans, finish_reason: str, reasoning: ReasoningFormat) -> Marks:
    """What is suspicious about one accepted reply."""
    has_markers = bool(reasoning.open_ids)
    is_cut = finish_reason == "length"
    return Marks(
        empty=spans.answer is None and spans.tool_calls is None and not is_cut,
        cut_by_length=is_cut,
        unclosed_reasoning=has_markers and reasoning.always_reasons and not spans.is_closed,
        no_reasoning=reasoning.always_reasons and spans.reasoning is None,
        repetition=has_loop(output_ids),
    )


def has_loop(ids: Sequence[int]) -> bool:
    """True if the end of `ids` is one block of ≤ 96 ids said at least eight times in a row (16 times for a single id)."""
    tail = list(ids[-LOOP_TAIL:])
    if len(tail) > 1:
        tail.pop()  # the end token stands outside the loop
    for period in range(1, min(LONGEST_LOOP, len(tail) // LOOP_REPEATS) + 1):
        if tail[-1] != tail[-1 - period]:
            continue
        length = max(period * LOOP_REPEATS, 16)
        if length <= len(tail) and tail[-length:-period] == tail[-length + period :]:
            return True
    return False


class Gates:
    """Rolling shares of one dataset. `add` returns newly breached warn levels and raises `GateError` at a stop level."""

    def __init__(self, dataset: str, config: GatesConfig) -> None:
        self.dataset = dataset
        self._config = config
        self._window: deque[Marks] = deque(maxlen=config.window)
        self._counts = dict.fromkeys(NAMES, 0)
        self._warned: set[str] = set()

    def shares(self) -> dict[str, float]:
        """Share of the window's replies per gate, 0..1."""
        size = max(1, len(self._window))
        return {name: self._counts[name] / size for name in NAMES}

    def breached(self) -> list[str]:
        """Names of the gates that are above their warn level now."""
        if len(self._window) < self._config.min_replies:
            return []
        return [name for name, share in self.shares().items() if share > getattr(self._config, name).warn]

    def add(self, marks: Marks, *, example: str = "") -> list[str]:
        """Count one outcome; `example` (a place to look, never a text) goes into the message."""
        if len(self._window) == self._window.maxlen:
            self._count(self._window[0], -1)
        self._window.append(marks)
        self._count(marks, +1)
        if len(self._window) < self._config.min_replies:
            return []
        return [name for name, share in self.shares().items() if self._is_new_warning(name, share, example)]

    def describe(self, name: str) -> str:
        """One gate's share of the window as a sentence."""
        return f"dataset {self.dataset}: {self.shares()[name]:.0%} of the last {len(self._window)} replies are {name}"

    def _count(self, marks: Marks, step: int) -> None:
        for name in NAMES:
            if getattr(marks, name):
                self._counts[name] += step

    def _is_new_warning(self, name: str, share: float, example: str) -> bool:
        gate: GateConfig = getattr(self._config, name)
        if share >= gate.stop and gate.stop < 1.0:
            raise GateError(f"{self.describe(name)} (stop level {gate.stop:.0%}); {ADVICE[name]}{example and '; ' + example}")
        if share > gate.warn:
            is_new = name not in self._warned
            self._warned.add(name)
            return is_new
        if share <= gate.warn / 2:
            self._warned.discard(name)
        return False
