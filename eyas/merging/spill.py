"""Buckets on disk: the first pass of a shuffle or sort that does not fit in memory.

Fixed-size heads and ragged int32 payloads go to bucket files by the top bits of a 64-bit key, so the
buckets, each small enough to be sorted in memory and taken in turn, stand in order of the key. How many
buckets there are changes nothing in what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eyas.files import storage_errors

Heads = npt.NDArray[np.void]
Tokens = npt.NDArray[np.int32]


class Spill:
    """Append-only buckets under `folder`, over keys in [0, 2**64); `buffer_bytes` is held back between writes."""

    def __init__(self, folder: Path, head: np.dtype[np.void], num_buckets: int, buffer_bytes: int) -> None:
        self.folder = folder
        self.head = head
        self.num_buckets = num_buckets
        self._buffer_bytes = buffer_bytes
        self._held: list[list[tuple[bytes, bytes]]] = [[] for _ in range(num_buckets)]
        self._held_bytes = 0
        folder.mkdir(parents=True)

    def add(self, keys: npt.NDArray[np.uint64], heads: Heads, tokens: Tokens | None = None) -> None:
        """Add rows [R]; `tokens` holds their payloads end to end, `heads["num_tokens"]` ids each."""
        high = (keys >> np.uint64(32)).astype(np.uint64)
        buckets = ((high * np.uint64(self.num_buckets)) >> np.uint64(32)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        ends = np.searchsorted(buckets[order], np.arange(self.num_buckets), side="right")
        offsets = np.concatenate([[0], np.cumsum(heads["num_tokens"], dtype=np.int64)]) if tokens is not None else None
        start = 0
        for bucket, end in enumerate(ends.tolist()):
            if end > start:
                rows = order[start:end]
                payload = b""
                if tokens is not None and offsets is not None:
                    payload = b"".join(tokens[offsets[row] : offsets[row + 1]].tobytes() for row in rows.tolist())
                self._hold(bucket, heads[rows].tobytes(), payload)
            start = end
        if self._held_bytes > self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is held back; raises `StorageError` where the disk refuses."""
        with storage_errors(self.folder):
            for bucket, pieces in enumerate(self._held):
                if pieces:
                    _append(self._path(bucket, "heads"), [head for head, _ in pieces])
                    _append(self._path(bucket, "tokens"), [payload for _, payload in pieces])
                    pieces.clear()
        self._held_bytes = 0

    def read(self) -> Iterator[tuple[Heads, Tokens]]:
        """Yield (heads, payloads end to end) of every bucket, in order of the key; each is removed once it was read."""
        self.flush()
        for bucket in range(self.num_buckets):
            heads, tokens = self._path(bucket, "heads"), self._path(bucket, "tokens")
            if heads.exists():
                yield np.fromfile(heads, dtype=self.head), np.fromfile(tokens, dtype=np.int32)
                heads.unlink()
                tokens.unlink()

    def _hold(self, bucket: int, head: bytes, payload: bytes) -> None:
        self._held[bucket].append((head, payload))
        self._held_bytes += len(head) + len(payload) + 200  # about what two bytes objects and a tuple cost

    def _path(self, bucket: int, kind: str) -> Path:
        return self.folder / f"{bucket:06d}.{kind}"


def _append(path: Path, pieces: list[bytes]) -> None:
    with open(path, "ab") as file:
        file.writelines(pieces)
