"""What kind of states a store holds, and the content address of a record in it.

The address digests the token ids and everything else that decides the numbers: target, blocks, codec,
source and precision. Equal address, equal states: resume and reuse are lookups, and states of another
target can never pass for ours.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import ArtifactError
from eyas.files import digest_json, read_json, write_json
from eyas.hidden.config import HiddenConfig
from eyas.hidden.locks import held
from eyas.hidden.precision import fastest_dtype
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder

KIND_NAME = "kind.json"
STATES_VERSION = 1


class StoreKind(BaseModel):
    """All that decides the numbers of a store beside the token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    blocks: tuple[int, int, int]
    hidden_size: int
    codec: str
    source: str
    dtype: str
    version: int = STATES_VERSION

    def digest(self) -> str:
        """SHA-256 in hex."""
        return digest_json(self.model_dump(mode="json"))

    def address(self, tokens: npt.NDArray[np.int32]) -> str:
        """Content address of a record: 32 hex digits over its ids and this kind."""
        ids = np.ascontiguousarray(tokens, dtype="<i4")
        return hashlib.blake2b(ids.tobytes(), digest_size=16, key=bytes.fromhex(self.digest())).hexdigest()


def resolve_kind(run: RunFolder, config: HiddenConfig, spec: TargetSpec) -> StoreKind:
    """The kind of this run's store; a precision of `auto` is measured once and then kept in `hidden/kind.json`."""
    path = run.hidden / KIND_NAME
    with held(run.hidden / ".kind.lock"):
        kept = _kept(path)
        dtype: str = config.dtype
        if dtype == "auto":
            asked = _kind(config, spec, kept.dtype if kept else "")
            dtype = kept.dtype if kept == asked and kept is not None else fastest_dtype()
        kind = _kind(config, spec, dtype)
        if kind != kept:
            write_json(path, kind.model_dump(mode="json"))
    return kind


def _kind(config: HiddenConfig, spec: TargetSpec, dtype: str) -> StoreKind:
    return StoreKind(
        target=spec.fingerprint,
        blocks=spec.aux_blocks,
        hidden_size=spec.hidden_size,
        codec=config.codec,
        source=config.source,
        dtype=dtype if config.source == "transformers" else spec.dtype,
    )


def _kept(path: Path) -> StoreKind | None:
    try:
        return StoreKind.model_validate(read_json(path))
    except (ArtifactError, ValidationError):
        return None
