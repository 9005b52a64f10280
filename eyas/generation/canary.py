"""The first replies of a dataset, judged before the long run: is the reasoning there, is there an answer at all?

The canary stops with one decoded reply in the message, because that is what tells a person which setting is
wrong. It is the only place where a text leaves the data files, and it goes to the raised error alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.errors import GateError
from eyas.generation.config import GatesConfig
from eyas.generation.gates import ADVICE, Marks
from eyas.sglang.replies import Decode

SHOWN_CHARACTERS = 600


@dataclass(kw_only=True)
class Canary:
    """Collects the first `wanted` outcomes of a dataset and judges them once."""

    dataset: str
    wanted: int
    decode: Decode
    outcomes: list[tuple[Marks, list[int], list[int]]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.outcomes) >= self.wanted

    def add(self, marks: Marks, input_ids: list[int], output_ids: list[int]) -> None:
        """Take one outcome; `output_ids` is empty for a reject."""
        if not self.is_complete:
            self.outcomes.append((marks, input_ids, output_ids))

    def judge(self, gates: GatesConfig) -> None:
        """Raise `GateError` if a gate's stop level is reached among the canary's replies, or if all of them fail."""
        if not self.outcomes:
            return
        for name in ("rejected", "empty", "no_reasoning", "unclosed_reasoning"):
            bad = [(input_ids, output_ids) for marks, input_ids, output_ids in self.outcomes if getattr(marks, name)]
            share = len(bad) / len(self.outcomes)
            if bad and share >= getattr(gates, name).stop:
                raise GateError(
                    f"canary of dataset {self.dataset}: {len(bad)} of {len(self.outcomes)} replies are {name} "
                    f"(stop level {getattr(gates, name).stop:.0%}); {ADVICE[name]}{self._show(*bad[0])}"
                )

    def _show(self, input_ids: list[int], output_ids: list[int]) -> str:
        if not output_ids:
            return ""
        prompt_end = self.decode(input_ids[-24:])[-80:]
        reply = self.decode(output_ids)
        cut = reply if len(reply) <= SHOWN_CHARACTERS else f"{reply[: SHOWN_CHARACTERS // 2]} … {reply[-SHOWN_CHARACTERS // 2 :]}"
        return f". One of them, after a prompt that ends {prompt_end!r}: {cut!r}"
