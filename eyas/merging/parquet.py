"""Parquet files whose bytes depend on their rows alone, not on the pieces in which the rows arrived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

TOKENS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
    ]
)
ORDER_SCHEMA = pa.schema([("position", pa.int64()), ("id", pa.string())])
_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


class RowGroups:
    """Writes row groups that close with the row whose weight brings them to `limit`."""

    def __init__(self, writer: pq.ParquetWriter, limit: int) -> None:
        self._writer = writer
        self._limit = limit
        self._held: list[pa.Table] = []
        self._weight = 0

    def add(self, table: pa.Table, weights: npt.NDArray[np.int64]) -> None:
        """Append the rows of `table`, `weights` [R] each."""
        sums = np.cumsum(weights)
        start, taken = 0, 0
        while start < len(sums):
            end = int(np.searchsorted(sums, taken + self._limit - self._weight)) + 1
            self._held.append(table.slice(start, end - start))
            self._weight += int(sums[min(end, len(sums)) - 1]) - taken
            if end <= len(sums):
                self.close_group()
            start, taken = end, int(sums[min(end, len(sums)) - 1])

    def close_group(self) -> None:
        """Write the rows held so far as one row group."""
        if self._held:
            table = pa.concat_tables(self._held).combine_chunks()  # pages must not depend on the pieces
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._held.clear()
            self._weight = 0


@contextmanager
def row_groups(path: Path, schema: pa.Schema, limit: int) -> Iterator[RowGroups]:
    """Open `path` for writing rows of `schema`; the file is whole only after a clean exit."""
    dictionary = [name for name in ("dataset", "split") if name in schema.names]
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=dictionary) as writer:
        groups = RowGroups(writer, limit)
        yield groups
        groups.close_group()


def hex_ids(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> pa.StringArray:
    """Record ids as 32 hex digits from their two halves [R]."""
    raw = np.stack([high, low], axis=1).astype(">u8").view(np.uint8).reshape(-1, 16)
    digits = _HEX[np.stack([raw >> 4, raw & 15], axis=2)]  # [R, 16, 2]
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * 32
    return pa.StringArray.from_buffers(len(raw), pa.py_buffer(offsets), pa.py_buffer(digits.tobytes()))
