"""The codecs by name, what each keeps of a token, and the bytes that takes (no torch: forecasts read this)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CodecName = Literal["bf16", "fp8", "int4", "int4_top"]
Number = Literal["bf16", "fp8", "int4"]
BLOCK = 32
"""Channels that share a scale; the hidden size must be a multiple."""
TOP = 64
"""Draft-vocabulary tokens whose probabilities are kept in place of a final state."""
_BITS = {"bf16": 16.0, "fp8": 8 + 16 / BLOCK, "int4": 4 + 16 / BLOCK}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Numbers of the three aux states, and of the final state; `final` None keeps top-k probabilities in its place."""

    aux: Number
    final: Number | None


CODECS: dict[CodecName, Codec] = {
    "bf16": Codec(aux="bf16", final="bf16"),
    "fp8": Codec(aux="fp8", final="fp8"),
    "int4": Codec(aux="int4", final="fp8"),
    "int4_top": Codec(aux="int4", final=None),
}


def bytes_per_token(hidden_size: int, name: CodecName) -> int:
    """Stored bytes of one token: its states, id (4) and mask (1); top-k: id (4) and log (2) of each, and the argmax (4)."""
    codec = CODECS[name]
    final = 6 * TOP + 4 if codec.final is None else hidden_size * _BITS[codec.final] / 8
    return round(3 * hidden_size * _BITS[codec.aux] / 8 + final) + 4 + 1
