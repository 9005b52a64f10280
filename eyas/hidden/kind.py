"""What kind of states a store holds, and the content address of a record in it.

The address digests the token ids and everything else that decides the numbers: target, blocks, codec,
source and precision. Equal address, equal states: resume and reuse are lookups, and states of another
target can never pass for ours.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import ArtifactError, ConfigError
from eyas.files import digest_file, digest_json, read_json, write_json
from eyas.hidden.codec import CODECS, TOP, CodecName
from eyas.hidden.config import HiddenConfig
from eyas.hidden.demands import check_codec
from eyas.hidden.locks import held
from eyas.manifest import verify_manifest
from eyas.merging.merge import MAP_NAME
from eyas.target.precision import native_dtype
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder

KIND_NAME = "kind.json"
STATES_VERSION = 1
_OPTIONAL = ("vocabulary", "num_top")


class StoreKind(BaseModel):
    """All that decides the numbers of a store beside the token ids."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    blocks: tuple[int, int, int]
    hidden_size: int
    codec: CodecName
    source: str
    dtype: str
    version: int = STATES_VERSION
    vocabulary: str = ""
    """SHA-256 of the vocabulary map, where the codec counts in draft tokens."""
    num_top: int = 0

    def digest(self) -> str:
        """SHA-256 in hex."""
        return digest_json(self.settings())

    def settings(self) -> dict[str, Any]:
        """As plain data; what only top-k codecs use is left out while empty, so that other kinds keep their addresses."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value or name not in _OPTIONAL}

    def address(self, tokens: npt.NDArray[np.int32]) -> str:
        """Content address of a record: 32 hex digits over its ids and this kind."""
        ids = np.ascontiguousarray(tokens, dtype="<i4")
        return hashlib.blake2b(ids.tobytes(), digest_size=16, key=bytes.fromhex(self.digest())).hexdigest()


def resolve_kind(run: RunFolder, config: HiddenConfig, spec: TargetSpec) -> StoreKind:
    """The kind of this run's store; a precision of `auto` is chosen once and then kept in `hidden/kind.json`."""
    path = run.hidden / KIND_NAME
    with held(run.hidden / ".kind.lock"):
        kept = _kept(path)
        dtype: str = config.dtype
        if dtype == "auto":
            asked = _kind(run, config, spec, kept.dtype if kept else "")
            dtype = kept.dtype if kept == asked and kept is not None else native_dtype()
        kind = _kind(run, config, spec, dtype)
        if kind != kept:
            write_json(path, kind.settings())
    return kind


def started_at(run: RunFolder) -> str:
    """When the extraction of this kind of states first began (UTC): its processes come and go, `hidden/kind.json` stays."""
    moment = datetime.fromtimestamp((run.hidden / KIND_NAME).stat().st_mtime, UTC)
    return moment.isoformat(timespec="seconds")


def read_map(run: RunFolder) -> tuple[torch.Tensor, str]:
    """The kept ids [D] of the merged vocabulary map, ascending, and the file's SHA-256; raises `ConfigError` before the merge."""
    try:
        verify_manifest(run.merged, checks_digests=False)
        d2t = load_file(run.merged / MAP_NAME)["d2t"]
    except (ArtifactError, OSError, SafetensorError, KeyError) as error:
        raise ConfigError(
            f"hidden.codec int4_top keeps probabilities of the draft vocabulary, and {run.merged / MAP_NAME} cannot be read "
            f"({error}); run the merge first, or choose hidden.codec int4"
        ) from error
    return torch.arange(len(d2t)) + d2t, digest_file(run.merged / MAP_NAME)


def _kind(run: RunFolder, config: HiddenConfig, spec: TargetSpec, dtype: str) -> StoreKind:
    check_codec(config, spec)
    kept, vocabulary = read_map(run) if CODECS[config.codec].final is None else (torch.zeros(0), "")
    return StoreKind(
        target=spec.fingerprint,
        blocks=spec.aux_blocks,
        hidden_size=spec.hidden_size,
        codec=config.codec,
        source=config.source,
        dtype=dtype if config.source == "transformers" else spec.dtype,
        vocabulary=vocabulary,
        num_top=min(TOP, len(kept)),
    )


def _kept(path: Path) -> StoreKind | None:
    try:
        return StoreKind.model_validate(read_json(path))
    except (ArtifactError, ValidationError):
        return None
