"""One shard on disk: a safetensors file of packed records and a JSON sidecar, its finished marker.

The tensors are written straight from memory in one pass that also digests them; the file appears under its
name only when whole, the sidecar after it. A shard without a sidecar that fits it does not exist. Rows are read
into memory of their own, not mapped: a mapped store stays in the reader's resident memory, page by page, up to all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

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


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard that was checked: where its tensors lie in the file."""

    path: Path
    offsets: torch.Tensor  # [R + 1] int64: the records' first rows
    shared: dict[str, torch.Tensor]
    """Tensors of one row for the whole shard."""
    places: dict[str, tuple[torch.dtype, int, int]]
    """Of tensors with a row for each token: dtype, width (0: one number a row) and first byte in the file."""
    stamp: tuple[int, int, int]

    def read(self, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """Rows [start, end) of every tensor, and the shared ones; raises `ArtifactError` if the file was changed meanwhile."""
        num_rows = (int(self.offsets[-1]) if end is None else end) - start
        tensors = dict(self.shared)
        try:
            with open(self.path, "rb", buffering=0) as file:
                if _stamp(file) != self.stamp:
                    raise ArtifactError(f"{self.path} was changed while it was read; run the same command again")
                for name, (dtype, width, first) in self.places.items():
                    shape = (num_rows, width) if width else (num_rows,)
                    tensors[name] = _read_tensor(file, dtype, shape, first + start * max(1, width) * dtype.itemsize)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read ({error}); run the extraction again") from error
        return tensors


def open_shard(folder: Path, entry: ShardEntry, kind: StoreKind, *, checks_digest: bool) -> Shard:
    """Find a shard's tensors without reading its states; raises `ArtifactError` if the file is not what `entry` says.

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
    try:
        with open(path, "rb", buffering=0) as file:
            stamp = _stamp(file)
            if checks_digest and digest_file(path) != entry.sha256:
                with storage_errors(path):
                    path.unlink(missing_ok=True)
                raise ArtifactError(f"{path} differs from the digest in its sidecar and is removed; run the extraction again")
            return _opened(path, file, stamp, entry, kind)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run the extraction again") from error


def shard_tensors(
    tokens: torch.Tensor, mask: torch.Tensor, lengths: list[int], states: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a shard in the order of the file: tokens [N], loss_mask [N], offsets [R + 1], then the states."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return {"offsets": offsets, **states, "tokens": tokens, "loss_mask": mask}


def _opened(path: Path, file: BinaryIO, stamp: tuple[int, int, int], entry: ShardEntry, kind: StoreKind) -> Shard:
    num_rows, records = sum(entry.num_tokens), len(entry.ids)
    states, single = layout(kind.codec, kind.hidden_size, kind.num_top)
    rows = {"tokens": (torch.int32, 0), "loss_mask": (torch.uint8, 0), **states}
    whole = {"offsets": (torch.int64, records + 1), **single}
    firsts = _firsts(
        path,
        file,
        {name: (dtype, (num_rows, width) if width else (num_rows,)) for name, (dtype, width) in rows.items()}
        | {name: (dtype, (size,)) for name, (dtype, size) in whole.items()},
    )
    shared = {name: _read_tensor(file, dtype, (size,), firsts[name]) for name, (dtype, size) in whole.items()}
    offsets = shared.pop("offsets")
    if (offsets.diff() != torch.tensor(entry.num_tokens, dtype=torch.int64)).any() or offsets[0] != 0:
        raise ArtifactError(f"{path}: its offsets are not the lengths in its sidecar; run the extraction again")
    places = {name: (dtype, width, firsts[name]) for name, (dtype, width) in rows.items()}
    return Shard(path=path, offsets=offsets, shared=shared, places=places, stamp=stamp)


def _firsts(path: Path, file: BinaryIO, wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """First byte of each tensor, by the header of the safetensors file; raises `ArtifactError` if they are not `wanted`, end to
    end."""
    size_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    try:
        header: Any = json.loads(os.pread(file.fileno(), min(header_bytes, size_bytes), 8))
        found = {name: (item["dtype"], tuple(item["shape"]), tuple(item["data_offsets"])) for name, item in header.items()}
        names = sorted(found, key=lambda name: found[name][2])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is not safetensors ({error}); run the extraction again") from error
    firsts, begin = {}, 0
    for name in names:
        dtype, shape = wanted.get(name, (torch.uint8, ()))
        end = begin + math.prod(shape) * dtype.itemsize
        if name not in wanted or found[name] != (_DTYPES[dtype], shape, (begin, end)):
            other = f"wanted {dtype} {list(shape)} at {begin}" if name in wanted else "which this codec does not write"
            raise ArtifactError(f"{path}: {name} is {found[name]}, {other}; run the extraction again")
        firsts[name], begin = 8 + header_bytes + begin, end
    if (missing := sorted(wanted.keys() - found.keys())) or 8 + header_bytes + begin != size_bytes:
        raise ArtifactError(f"{path} holds {begin} bytes of tensors and lacks {missing}; run the extraction again")
    return firsts


def _read_tensor(file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> torch.Tensor:
    """A tensor of its own from the bytes at `first`; raises `OSError` at the end of the file."""
    tensor = torch.empty(shape, dtype=dtype)
    rest = _bytes_of(tensor)
    while len(rest):
        count = os.preadv(file.fileno(), [rest[: 1 << 30]], first)
        if not count:
            raise OSError(f"its end came {len(rest)} bytes early")
        rest, first = rest[count:], first + count
    return tensor


def _stamp(file: BinaryIO) -> tuple[int, int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _bytes_of(tensor: torch.Tensor) -> memoryview[int]:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
