"""Rows of Parquet and CSV files, one at a time; what cannot be read, or is too large, is a problem in its row's place.

Parquet is read in small batches, and row by row where a batch does not convert whole; CSV as the csv
module streams it, which is shown only the outline of a row above the limit.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import RecordError

TableRow = dict[str, Any] | RecordError
"""A row by its columns' names, or why there is none."""

_BUFFER_BYTES = 1 << 18
_BATCH_ROWS = 64
_CSV_FILLING = re.compile(r'[^",\r\n]+')


def too_large(max_row_bytes: int) -> RecordError:
    """The problem of a row above the limit."""
    return RecordError("row_too_large", f"larger than prompts.max_row_bytes = {max_row_bytes}")


def parquet_rows(path: Path, max_row_bytes: int) -> Iterator[tuple[int, TableRow]]:
    """(1-based number, row) of a Parquet file; a time that Python cannot hold is left out of its row."""
    number = 0
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in _batch_rows(batch, max_row_bytes):
                number += 1
                yield number, row


def csv_rows(stream: IO[bytes], max_row_bytes: int) -> Iterator[tuple[int, TableRow]]:
    """(1-based number, the header's being 1, row) of a CSV file in UTF-8; blank lines are none."""
    csv.field_size_limit(sys.maxsize)  # past its limit the csv module would read on inside of the quotes
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        lines = _CsvLines(text, max_row_bytes)
        reader = csv.reader(lines)
        header = next(reader, None)
        number = 1
        while header is not None:
            number += 1
            lines.num_bytes = 0
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, RecordError("bad_csv", str(error))
                continue
            if lines.num_bytes > max_row_bytes:
                yield number, too_large(max_row_bytes)
            elif len(values) == len(header):
                yield number, dict(zip(header, values, strict=True))
            elif values:
                yield number, RecordError("bad_csv", f"{len(values)} fields, the header has {len(header)}")


def _batch_rows(batch: pa.RecordBatch, max_row_bytes: int) -> Iterator[TableRow]:
    """Rows of a batch; one by one where some may be too large or hold what Python cannot."""
    if batch.nbytes <= max_row_bytes:
        try:
            yield from batch.to_pylist()
            return
        except (ValueError, OverflowError):
            pass
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        yield too_large(max_row_bytes) if _num_bytes(row) > max_row_bytes else _one_row(row)


def _num_bytes(row: pa.RecordBatch) -> int:
    """Bytes of one row, without those of the values that its dictionaries hold for others."""
    return sum((column.dictionary_decode() if pa.types.is_dictionary(column.type) else column).nbytes for column in row.columns)


def _one_row(row: pa.RecordBatch) -> TableRow:
    values = {}
    for key, column in zip(row.schema.names, row.columns, strict=True):
        try:
            values[key] = column[0].as_py()
        except (ValueError, OverflowError) as error:
            if not pa.types.is_temporal(column.type):  # a time is nothing that a prompt is made of
                return RecordError("bad_parquet", f"column {key}: {error}")
    return values


class _CsvLines:
    """Lines for the csv module; of a row above the limit only what tells where it ends, so that it is never held."""

    def __init__(self, text: IO[str], max_row_bytes: int) -> None:
        self._text = text
        self._max_row_bytes = max_row_bytes
        self.num_bytes = 0
        """Bytes of the row at hand; the reader sets it to 0 before each row."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            line = next(self._text)
            is_first = self.num_bytes == 0
            self.num_bytes += len(line.encode("utf-8", "surrogateescape"))
            if self.num_bytes <= self._max_row_bytes:
                return line
            if is_first or '"' in line:  # inside of quotes, a line without one changes nothing
                return _CSV_FILLING.sub("x", line)
