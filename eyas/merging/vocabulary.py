"""The draft's vocabulary: which target ids it can propose, and how the two numberings map.

Kept are the D most frequent generated ids of the training split, ties by id; the end, think and tool
tokens always. Where fewer than D ids occur, the lowest ids that do not occur fill the rest: byte-pair
tokenizers number their most frequent merges first. `d2t[i]` is an **offset**: target id = i + d2t[i].
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError
from eyas.files import digest_json, write_bytes
from eyas.target.reasoning import find_reasoning_format
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VocabularyMap:
    """D kept ids out of V."""

    kept: npt.NDArray[np.int64]  # [D], ascending
    vocab_size: int
    num_filled: int
    """Kept ids that never occur and are not forced: the fill."""

    @property
    def d2t(self) -> npt.NDArray[np.int64]:
        """[D] offsets: target id = i + d2t[i]."""
        return self.kept - np.arange(len(self.kept))

    @property
    def t2d(self) -> npt.NDArray[np.bool_]:
        """[V], true for kept ids."""
        member = np.zeros(self.vocab_size, dtype=np.bool_)
        member[self.kept] = True
        return member

    def coverage(self, counts: npt.NDArray[np.int64]) -> float:
        """Share of the ids counted in `counts` [V] that the draft can propose; 1 if none were counted."""
        total = int(counts.sum())
        return float(counts[self.kept].sum() / total) if total else 1.0

    def digest(self) -> str:
        """SHA-256 over the kept ids, in hex."""
        return digest_json({"vocab_size": self.vocab_size, "kept": self.kept.tolist()})

    def write(self, path: Path) -> None:
        """Write `d2t` and `t2d` as safetensors, atomically."""
        write_bytes(path, safetensors.numpy.save({"d2t": self.d2t, "t2d": self.t2d}))


def build_map(counts: npt.NDArray[np.int64], forced: Collection[int], draft_vocab_size: int) -> VocabularyMap:
    """Choose the draft's vocabulary from how often each id was generated, `counts` [V].

    Raises `ConfigError` if the forced tokens alone do not fit.
    """
    vocab_size = len(counts)
    if draft_vocab_size > vocab_size:
        logger.warning(
            "draft_vocab_size=%d exceeds vocab_size=%d: the draft keeps the whole vocabulary", draft_vocab_size, vocab_size
        )
    size = min(draft_vocab_size, vocab_size)
    always = np.unique(np.fromiter(forced, dtype=np.int64))
    if len(always) > size:
        raise ConfigError(
            f"merging.draft_vocab_size is {size}, the target's end, think and tool tokens alone are {len(always)}; raise it"
        )
    rank = np.lexsort((np.arange(vocab_size), -counts))  # by count descending, then id: ids that never occur follow, ascending
    rank = np.concatenate([always, rank[~np.isin(rank, always)]])[:size]
    num_filled = int((counts[rank[len(always) :]] == 0).sum())
    return VocabularyMap(kept=np.sort(rank), vocab_size=vocab_size, num_filled=num_filled)


def kept_map(baseline: Path, spec: TargetSpec) -> VocabularyMap:
    """The map of the draft that training starts from, `baseline` as the run imported it: a warm start keeps it.

    Built anew from other data, each row of the draft's head would mean another token
    (https://github.com/sgl-project/SpecForge/pull/534). Raises `ArtifactError` where there is none.
    """
    path = baseline / "model.safetensors"
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            d2t = file.get_tensor("d2t")
    except (OSError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"{path} has no vocabulary map ({error}); open the run again, it imports draft.baseline") from error
    return VocabularyMap(kept=d2t + np.arange(len(d2t)), vocab_size=spec.vocab_size, num_filled=0)


def forced_tokens(spec: TargetSpec, config: RunConfig) -> list[int]:
    """Ids that the draft must always be able to propose: end, think and tool tokens, ascending."""
    ends = {*spec.eos_token_ids, *config.generation.sampling.stop_token_ids}
    form = find_reasoning_format(load_tokenizer(spec), config.target, end_token_ids=ends)
    ids = {*ends, *form.open_ids, *form.close_ids, *form.tool_begin_ids, *form.tool_end_ids}
    return sorted(token for token in ids if 0 <= token < spec.vocab_size)
