"""Random access to the states of finished extractions, by record id: read into memory of their own, and decoded.

A shard's digest is checked when it is first opened (about 1.5 GB/s, once per process); its states are
checked to be finite whenever a record is read. What is not in the index is never read. A record is a few long reads
(8·H bytes a token), so an epoch in any order of records costs what one in the order of shards does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import ValidationError

from eyas.errors import ArtifactError
from eyas.files import read_json_lines
from eyas.hidden.codec import CODECS
from eyas.hidden.kind import StoreKind
from eyas.hidden.store.codecs import decode
from eyas.hidden.store.shard import Quarantined, Shard, ShardEntry, load_entry, open_shard
from eyas.hidden.store.top import decode_top
from eyas.manifest import Manifest, verify_manifest

INDEX_NAME = "index.parquet"
REJECTS_NAME = "rejects.jsonl"
LAYERS = ("low", "middle", "high")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record's ids and states, in memory of its own."""

    tokens: torch.Tensor  # [T] int32
    loss_mask: torch.Tensor  # [T] uint8, 1 on generated ids
    aux: torch.Tensor  # [T, 3H] bf16: low | middle | high
    final: torch.Tensor  # [T, H] bf16, the input of lm_head; in a store of top-k probabilities those, [T, 1 + 2k] (`store.top`)


class HiddenStore:
    """The reader of `hidden/`; raises `ArtifactError` where a file is missing, damaged or of another target."""

    def __init__(self, folder: Path, *, checks_digests: bool = True) -> None:
        self.folder = folder
        self.manifest = verify_store(folder)
        self.kind = _kind_of(self.manifest, folder)
        self.hidden_size = self.kind.hidden_size
        self._checks_digests = checks_digests
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        table = _read_index(folder, self.manifest)
        names = table["shard"].to_pylist()
        self._rows: dict[str, tuple[str, int, int]] = dict(
            zip(
                table["id"].to_pylist(),
                zip(names, table["row"].to_pylist(), table["num_tokens"].to_pylist(), strict=True),
                strict=True,
            )
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, record_id: object) -> bool:
        return record_id in self._rows

    def ids(self) -> list[str]:
        """Ids of all records, ascending."""
        return list(self._rows)

    def quarantined(self) -> dict[str, str]:
        """Ids that were to be extracted and have no states, each with its reason: a reader leaves them out."""
        path = self.folder / REJECTS_NAME
        rejects = (Quarantined.model_validate_json(line) for _, line in read_json_lines(path))
        return {item.id: item.reason for item in rejects if item.id is not None and item.id not in self._rows}

    def num_tokens(self, record_id: str) -> int:
        """Length T of a record, from the index."""
        return self._row(record_id)[2]

    def record(self, record_id: str) -> Record:
        """One record; raises `ArtifactError` naming record and layer if a state is not finite, or the id unknown."""
        shard, row, num_tokens = self._row(record_id)
        return read_record(self._open(shard), row, num_tokens, self.kind, f"record {record_id} in {self.folder / shard}")

    def expect(self, ids: Sequence[str]) -> None:
        """Told what will be read, in order, before it is read; a whole store has no need to know."""

    def refused(self) -> set[str]:
        """Ids whose states were refused while training read them; a whole store knows its own beforehand (`quarantined`)."""
        return set()

    def figures(self) -> dict[str, Any]:
        """What a training's manifest says of its reading."""
        return {}

    def close(self) -> None:
        """Nothing runs that would have to end."""

    def verify(self) -> Iterator[str]:
        """Deep verification, shard by shard: digests, shapes, content addresses, finite states; yields each good shard's name."""
        by_shard: dict[str, list[str]] = {}
        for record_id, (shard, _, _) in self._rows.items():
            by_shard.setdefault(shard, []).append(record_id)
        for shard, ids in by_shard.items():
            entry = self._entry(shard)
            self._open(shard)
            addresses = dict(zip(entry.ids, entry.addresses, strict=True))
            for record_id in ids:
                address = self.kind.address(self.record(record_id).tokens.numpy())
                if address != addresses.get(record_id):
                    raise ArtifactError(
                        f"record {record_id} in {self.folder / shard}: its ids have address {address}, the sidecar says "
                        f"{addresses.get(record_id)}; remove the shard and run the extraction again"
                    )
            yield shard

    def _row(self, record_id: str) -> tuple[str, int, int]:
        found = self._rows.get(record_id)
        if found is None:
            raise ArtifactError(f"record {record_id} is not in {self.folder / INDEX_NAME}; run the extraction for its dataset")
        return found

    def _entry(self, shard: str) -> ShardEntry:
        entry = load_entry(self.folder / f"{shard}.json")
        if entry.kind != self.kind.digest():
            raise ArtifactError(
                f"{self.folder / entry.file_name} holds states of another kind ({entry.kind[:12]}, wanted "
                f"{self.kind.digest()[:12]}: target, blocks, codec, source or precision differ); run the extraction again"
            )
        return entry

    def _open(self, shard: str) -> Shard:
        with self._lock:
            if shard not in self._shards:
                entry = self._entry(shard)
                self._shards[shard] = open_shard(self.folder, entry, self.kind, checks_digest=self._checks_digests)
            return self._shards[shard]


def verify_store(folder: Path) -> Manifest:
    """The manifest of a store whose files are what it says; shards by size, as they are digested when first opened."""
    return verify_manifest(folder, unread=".safetensors")


def read_record(shard: Shard, row: int, num_tokens: int, kind: StoreKind, where: str) -> Record:
    """Record number `row` of an open shard, decoded; raises `ArtifactError` about `where` if it is not what it should be."""
    start, end = shard.offsets[row : row + 2].tolist()
    if end - start != num_tokens:
        raise ArtifactError(f"{where}: the shard holds {end - start} rows, the index says {num_tokens}")
    tensors, every, codec = shard.read(start, end), slice(None), CODECS[kind.codec]
    aux = decode("aux", tensors, every, codec.aux)
    final = decode_top(tensors, every) if codec.final is None else decode("final", tensors, every, codec.final)
    if (fault := not_finite(aux, final)) is not None:
        raise ArtifactError(f"{where}: {fault}; remove the shard and run the extraction again")
    return Record(tokens=tensors["tokens"], loss_mask=tensors["loss_mask"], aux=aux, final=final)


def not_finite(aux: torch.Tensor, final: torch.Tensor) -> str | None:
    """Name the first layer and row that hold a NaN or an infinity, or None; aux [T, 3H], final [T, H]."""
    if bool(torch.isfinite(aux.sum(dtype=torch.float32) + final.sum(dtype=torch.float32))):
        return None  # a NaN or infinity anywhere would have survived both sums
    for name, states in zip((*LAYERS, "final"), (*aux.chunk(3, dim=-1), final), strict=True):
        rows = (~torch.isfinite(states)).any(dim=-1).nonzero()
        if len(rows):
            return f"the {name} state of row {int(rows[0])} is not finite"
    return None


def _kind_of(manifest: Manifest, folder: Path) -> StoreKind:
    try:
        return StoreKind.model_validate(manifest.config["kind"])
    except (KeyError, ValidationError) as error:
        raise ArtifactError(f"{folder} is not a hidden-state store: its manifest names no kind; run the extraction") from error


def _read_index(folder: Path, manifest: Manifest) -> pa.Table:
    path = folder / INDEX_NAME
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); run the extraction again") from error
    if table.num_rows != manifest.counts.done:
        raise ArtifactError(
            f"{path} has {table.num_rows} records, its manifest says {manifest.counts.done}; run the extraction again"
        )
    return table
