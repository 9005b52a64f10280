"""Rows of Parquet and CSV files, one at a time; what cannot be read, or is too large, is a problem in its row's place.

Parquet is read in small batches, and row by row where a batch does not convert whole; CSV as the csv
module streams it, which is shown only the outline of a row above the limit. A CSV row with a quote that
is never closed, or closed in the midst of a field, costs its first line: the lines after it are read anew.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import RecordError
from eyas.prompts.conversation import MEDIA_KEYS

TableRow = dict[str, Any] | RecordError
"""A row by its columns' names, or why there is none."""

_BUFFER_BYTES = 1 << 18
_BATCH_ROWS = 64
_CSV_FILLING = re.compile(r'[^",\r\n]+')


def too_large(max_row_bytes: int) -> RecordError:
    """The problem of a row above the limit."""
    return RecordError("row_too_large", f"larger than prompts.max_row_bytes = {max_row_bytes}")


def not_utf8(error: UnicodeError, text: bytes) -> RecordError:
    """The problem of a row that holds a byte which no UTF-8 text has, at `error.start` of `text`."""
    start = int(getattr(error, "start", 0))
    return RecordError("not_utf8", f"byte 0x{text[start]:02x} at {start} of the row is no UTF-8; convert the file (see iconv)")


def parquet_rows(path: Path, max_row_bytes: int, fields: Collection[str] = ()) -> Iterator[tuple[int, TableRow]]:
    """(1-based number, row) of a Parquet file; a time that Python cannot hold is left out of its row.

    With `fields` only their columns are read, and those that may hold pictures or sound; all where one of them is absent.
    """
    number = 0
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=_columns(file.schema_arrow.names, fields)):
            for row in _batch_rows(batch, max_row_bytes):
                number += 1
                yield number, row


def _columns(names: list[str], fields: Collection[str]) -> list[str] | None:
    """The columns that hold the fields (dots go into objects); None for all of them."""
    wanted = {name if name in names else name.split(".")[0] for name in fields}
    if not wanted or not wanted <= set(names):
        return None
    return [name for name in names if name in wanted or name in MEDIA_KEYS]


def csv_rows(open_file: Callable[[], IO[bytes]], max_row_bytes: int) -> Iterator[tuple[int, TableRow]]:
    """(1-based line on which it begins, row) of a CSV file in UTF-8; blank lines are none."""
    csv.field_size_limit(sys.maxsize)  # past its limit the csv module would read on inside of the quotes
    lines = _CsvLines(open_file, max_row_bytes)
    try:
        reader = csv.reader(lines, strict=True)
        header = next(reader, None)
        while header is not None:
            lines.begin_row()
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield lines.first, RecordError("bad_csv", f"{error}, in the row that begins on line {lines.first}")
                lines.go_on_after_first()
                continue
            if lines.num_bytes > max_row_bytes:
                yield lines.first, too_large(max_row_bytes)
            elif len(values) == len(header):
                yield lines.first, _text_row(header, values)
            elif values:
                yield lines.first, RecordError("bad_csv", f"{len(values)} fields, the header has {len(header)}")
    finally:
        lines.close()


def _text_row(header: list[str], values: list[str]) -> TableRow:
    try:
        ",".join(values).encode()
    except UnicodeEncodeError as error:
        return not_utf8(error, ",".join(values).encode("utf-8", "surrogateescape"))
    return dict(zip(header, values, strict=True))


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

    def __init__(self, open_file: Callable[[], IO[bytes]], max_row_bytes: int) -> None:
        self._open_file = open_file
        self._max_row_bytes = max_row_bytes
        self._text = self._opened()
        self._number = 0
        """Lines that were handed out, and that stand before the next one in the file."""
        self._again: deque[str] = deque()
        self.begin_row()

    def _opened(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self._open_file(), encoding="utf-8-sig", errors="surrogateescape", newline="")

    def close(self) -> None:
        self._text.close()

    def begin_row(self) -> None:
        """What follows is a row of its own."""
        self.first = self._number + 1
        """Line on which the row at hand begins."""
        self.num_bytes = 0
        """Bytes of the row at hand."""
        self._held: list[str] = []

    def go_on_after_first(self) -> None:
        """Hand out the lines after the row's first one again; a row above the limit is looked up in the file for that."""
        if self.num_bytes <= self._max_row_bytes:
            self._again.extendleft(reversed(self._held[1:]))
        else:
            self.close()
            self._again.clear()
            self._text = self._opened()
            next(islice(self._text, self.first - 1, self.first), None)
        self._number = self.first

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            line = self._again.popleft() if self._again else next(self._text)
            self._number += 1
            is_first = self.num_bytes == 0
            self.num_bytes += len(line.encode("utf-8", "surrogateescape"))
            if self.num_bytes <= self._max_row_bytes:
                self._held.append(line)
                return line
            self._held.clear()
            if is_first or '"' in line:  # inside of quotes, a line without one changes nothing
                return _CSV_FILLING.sub("x", line)
