"""The target as the top-k probabilities of the draft vocabulary: 388 bytes a token at any hidden size.

Kept of each generated position: log-probabilities of the k most probable draft tokens, normalised over the
draft vocabulary, and the full vocabulary's argmax, which decides what is a miss. The mass that is left is
spread evenly over the rest. Draft ids mean nothing without the map they were counted with, so the map's
digest is part of the store's kind. Decoded rows are [T, 1 + 2k] fp32: argmax | draft ids | logs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from eyas.errors import ConfigError
from eyas.hidden.codec import TOP
from eyas.hidden.kind import StoreKind, read_map
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head
from eyas.workspace import RunFolder

_ROWS = 256
_SMALLEST_REST = 1e-6


@dataclass(frozen=True, kw_only=True)
class TopTargets:
    """Makes them: lm_head [V, H] on the device that multiplies, and the kept ids [D] of the map."""

    lm_head: torch.Tensor
    kept: torch.Tensor

    def encode(self, final: torch.Tensor, loss_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of final states [N, H]: `top_ids` int32, `top_logs` fp16 [N, k], `argmax` int32 [N, 1]; zero outside generated ids."""
        num_top = min(TOP, len(self.kept))
        result = {
            "top_ids": torch.zeros(len(final), num_top, dtype=torch.int32),
            "top_logs": torch.zeros(len(final), num_top, dtype=torch.float16),
            "argmax": torch.zeros(len(final), 1, dtype=torch.int32),
        }
        for rows in torch.split(loss_mask.nonzero()[:, 0], _ROWS):
            logits = F.linear(final[rows].to(self.lm_head.device, self.lm_head.dtype), self.lm_head).float()  # [n, V]
            logs, ids = logits[:, self.kept].log_softmax(-1).topk(num_top)
            result["argmax"][rows, 0] = logits.argmax(-1).int().cpu()
            result["top_ids"][rows], result["top_logs"][rows] = ids.int().cpu(), logs.half().cpu()
        return result


def open_top_targets(run: RunFolder, spec: TargetSpec, kind: StoreKind) -> TopTargets:
    """For the merged map of `run`, in fp32 on the GPU if there is one; raises `ConfigError` if the map is not the kind's."""
    kept, vocabulary = read_map(run)
    if vocabulary != kind.vocabulary:
        raise ConfigError(f"{run.merged} has another vocabulary map than the extraction began with; run the extraction again")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TopTargets(lm_head=load_head(spec, torch.float32).lm_head.to(device), kept=kept.to(device))


def decode_top(tensors: dict[str, torch.Tensor], rows: slice) -> torch.Tensor:
    """Rows [T, 1 + 2k] fp32 of a shard (ids below 2^24 are exact)."""
    return torch.cat([tensors[name][rows].float() for name in ("argmax", "top_ids", "top_logs")], -1)


def top_argmax(rows: torch.Tensor) -> torch.Tensor:
    """The target's full-vocabulary argmax [M] int64 of decoded rows."""
    return rows[:, 0].long()


def top_logits(rows: torch.Tensor, draft_vocab_size: int) -> torch.Tensor:
    """Log-probabilities [M, D] over the draft vocabulary of decoded rows [M, 1 + 2k]."""
    ids, logs = rows[:, 1:].chunk(2, -1)
    num_rest = draft_vocab_size - ids.shape[1]
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_REST) / max(1, num_rest)
    return rest.log().expand(-1, draft_vocab_size).scatter(1, ids.long(), logs)
