"""The one interface of all sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class States:
    """What the target computes over one sequence of T ids, on the CPU."""

    aux: torch.Tensor  # [T, 3H] bf16: outputs of the blocks `TargetSpec.aux_blocks`, low | middle | high
    final: torch.Tensor  # [T, H] bf16: the input of lm_head, after the final norm


class Source(Protocol):
    """Computes states; may reorder for speed."""

    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        """Yield (index into `sequences`, states) for each of them once, in any order.

        Raises `ConfigError` if the source cannot give these states at all, `ServerError` if it may heal.
        """
        ...
