"""One shard on disk: a safetensors file of packed records and a JSON sidecar, its finished marker.

The tensors are written straight from memory in one pass that also digests them; the file appears under its
name only when whole, the sidecar after it. A shard without a sidecar that fits it does not exist.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from eyas.errors import ArtifactError
from eyas.files import atomic_file, digest_file, read_sealed, storage_errors, write_sealed
from eyas.hidden.kind import StoreKind
from eyas.hidden.store.codecs import layout

_DTYPES = {
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}
_WRITE_BYTES = 8 << 20


class Quarantined(BaseModel):
    """A record that is not in the store, with its reason; `where` is `file:line`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str | None
    reason: str
    where: str
    detail: str


class ShardEntry(BaseModel):
    """The sidecar: which records a shard holds, in order, and what its file must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dataset: str
    number: int
    kind: str
    plan: str
    ids: list[str]
    addresses: list[str]
    num_tokens: list[int]
    quarantined: list[Quarantined]
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def sidecar_name(self) -> str:
        return f"{self.name}.json"


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Write `tensors` as safetensors, atomically; returns (bytes, SHA-256). Raises `StorageError` if the disk refuses."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants tensors aligned to eight bytes
    digest = hashlib.sha256()
    size_bytes = 0
    with atomic_file(path) as file:
        pieces: list[memoryview[int]] = [
            memoryview(len(encoded).to_bytes(8, "little") + encoded),
            *(_bytes_of(tensor) for tensor in tensors.values()),
        ]
        for piece in pieces:
            for start in range(0, len(piece), _WRITE_BYTES):
                part = piece[start : start + _WRITE_BYTES]
                digest.update(part)
                file.write(part)
            size_bytes += len(piece)
    return size_bytes, digest.hexdigest()


def write_entry(folder: Path, entry: ShardEntry) -> None:
    """Write the sidecar; from then on the shard exists."""
    write_sealed(folder / entry.sidecar_name, entry.model_dump(), indent=None)


def load_entry(path: Path) -> ShardEntry:
    """Read a sidecar; raises `ArtifactError` naming it if it is missing, edited or not one."""
    try:
        return ShardEntry.model_validate(read_sealed(path))
    except ValidationError as error:
        raise ArtifactError(f"{path} is not a shard's sidecar ({error.errors()[0]['msg']}); run the extraction again") from error


def open_shard(folder: Path, entry: ShardEntry, kind: StoreKind, *, checks_digest: bool) -> dict[str, torch.Tensor]:
    """Map a shard's tensors from disk without reading them; raises `ArtifactError` if the file is not what `entry` says.

    A file whose digest differs is removed, so that the next extraction makes it anew.
    """
    path = folder / entry.file_name
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; run the extraction again")
    if path.stat().st_size != entry.size_bytes:
        raise ArtifactError(
            f"{path} has {path.stat().st_size} bytes, its sidecar says {entry.size_bytes}: it is truncated or another's; "
            "run the extraction again"
        )
    if checks_digest and digest_file(path) != entry.sha256:
        with storage_errors(path):
            path.unlink(missing_ok=True)
        raise ArtifactError(f"{path} differs from the digest in its sidecar and is removed; run the extraction again")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} is not safetensors ({error}); run the extraction again") from error
    _check_shapes(path, tensors, entry, kind)
    return tensors


def shard_tensors(
    tokens: torch.Tensor, mask: torch.Tensor, lengths: list[int], states: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a shard in the order of the file: tokens [N], loss_mask [N], offsets [R + 1], then the states."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return {"offsets": offsets, **states, "tokens": tokens, "loss_mask": mask}


def _check_shapes(path: Path, tensors: dict[str, torch.Tensor], entry: ShardEntry, kind: StoreKind) -> None:
    rows, records = sum(entry.num_tokens), len(entry.ids)
    states, shared = layout(kind.codec, kind.hidden_size, kind.num_top)
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int32, (rows,)),
        "loss_mask": (torch.uint8, (rows,)),
        "offsets": (torch.int64, (records + 1,)),
        **{name: (dtype, (rows, width)) for name, (dtype, width) in states.items()},
        **{name: (dtype, (width,)) for name, (dtype, width) in shared.items()},
    }
    for name, (dtype, shape) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            seen = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ArtifactError(f"{path}: {name} is {seen}, wanted {dtype} {list(shape)}; run the extraction again")
    if (tensors["offsets"].diff() != torch.tensor(entry.num_tokens, dtype=torch.int64)).any() or tensors["offsets"][0] != 0:
        raise ArtifactError(f"{path}: its offsets are not the lengths in its sidecar; run the extraction again")


def _bytes_of(tensor: torch.Tensor) -> memoryview[int]:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
