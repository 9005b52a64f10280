"""Rows of a file, one at a time, whatever its format; memory is bounded by one row.

A row that cannot be read is a problem with its place (`file:line` or `file:row`), never the end of the
file. JSON Lines are split on LF bytes only; a JSON array is cut into its elements by a scanner that
holds one element; Parquet and CSV are those of `tables`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from eyas.errors import ConfigError, RecordError
from eyas.prompts.tables import TableRow, csv_rows, not_utf8, parquet_rows, too_large

_CHUNK_BYTES = 1 << 18
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_FORMATS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_STRUCTURE = re.compile(rb'["\\\[\]{}]')
_BETWEEN = re.compile(rb"[\s,]+")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: where it stands, and its value or what is wrong with it."""

    where: str
    value: Any = None
    problem: RecordError | None = None


def is_readable(path: Path) -> bool:
    """True if the file's name says a format that `read_rows` knows."""
    return _suffixes(path)[0] in _FORMATS


def read_rows(
    path: Path, *, name: str, max_row_bytes: int, json_depth: int | None = None, fields: Collection[str] = ()
) -> Iterator[Row]:
    """Yield every row of `path`, named `name:number`; raises `ConfigError` where the file itself is unreadable.

    The number is that of the line on which a row of JSON Lines or CSV begins, and otherwise the row's own. JSON is
    lines, an array or objects one after the other, as the file shows; `json_depth` names the number of brackets
    around its rows instead (1 for an object whose values are the rows). `fields` are the parts of a row that will be
    looked at: Parquet leaves other columns unread.
    """
    suffix, _ = _suffixes(path)
    number = 0
    try:
        if suffix == ".parquet":
            rows = _placed(parquet_rows(path, max_row_bytes, fields), name)
        elif suffix == ".csv":
            rows = _placed(csv_rows(lambda: _open(path), max_row_bytes), name)
        else:
            rows = _read_json(path, name, max_row_bytes, json_depth)
        for row in rows:
            number += 1
            yield row
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, csv.Error) as error:
        raise ConfigError(
            f"{path} is damaged after row {number}: {error}; fetch the file again or remove it from the source"
        ) from error


def _placed(rows: Iterator[tuple[int, TableRow]], name: str) -> Iterator[Row]:
    for number, row in rows:
        where = f"{name}:{number}"
        yield Row(where=where, problem=row) if isinstance(row, RecordError) else Row(where=where, value=row)


def _suffixes(path: Path) -> tuple[str, str]:
    compression = path.suffix.lower() if path.suffix.lower() in _COMPRESSIONS else ""
    stem = path.name[: len(path.name) - len(compression)] if compression else path.name
    return Path(stem).suffix.lower(), compression


def _open(path: Path) -> IO[bytes]:
    match _suffixes(path)[1]:
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(path, "rb"))
        case ".bz2":
            return cast(IO[bytes], bz2.BZ2File(path, "rb"))
        case ".xz":
            return cast(IO[bytes], lzma.LZMAFile(path, "rb"))
        case ".zst":
            return cast(IO[bytes], io.BufferedReader(pa.input_stream(str(path), compression="zstd")))
    return open(path, "rb")


def _read_json(path: Path, name: str, max_row_bytes: int, depth: int | None) -> Iterator[Row]:
    with _open(path) as stream:
        head = stream.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf")
        if depth is None:
            depth = _json_depth(head.lstrip(), _suffixes(path)[0])
        if depth is not None:
            for index, element in enumerate(_elements(head, stream, max_row_bytes, depth_of_rows=depth), start=1):
                yield _parse(element, f"{name}:{index}", max_row_bytes)
            return
        for number, line in _lines(head, stream, max_row_bytes):
            if line is None or line.strip():
                yield _parse(line, f"{name}:{number}", max_row_bytes)


def _json_depth(head: bytes, suffix: str) -> int | None:
    """Brackets around the rows of a JSON file, seen from its head; None for JSON Lines."""
    if head[:1] not in (b"[", b"{") or _is_torn_line(head):
        return None
    if head[:1] == b"[" and suffix == ".json":
        return 1
    if _parses(head.split(b"\n", 1)[0]):
        return None
    if head[:1] == b"[":  # an array in a file that is named as lines
        return 1
    return 0 if suffix == ".json" else None


def _is_torn_line(head: bytes) -> bool:
    """True if the first line is a broken one of JSON Lines: a whole row follows it, and together they are no JSON either."""
    first, _, rest = head.partition(b"\n")
    second = rest.lstrip().split(b"\n", 1)[0]
    if first.strip() in (b"[", b"{") or second[:1] not in (b"[", b"{") or _parses(first) or not _parses(second):
        return False
    text = head.decode("utf-8", "surrogateescape")
    try:
        json.JSONDecoder(strict=False).raw_decode(text)
    except json.JSONDecodeError as error:
        return len(head) < _CHUNK_BYTES // 2 or "\n" in text[error.pos :]  # not merely cut where the head ends
    except (ValueError, RecursionError):
        pass
    return False


def _lines(head: bytes, stream: IO[bytes], max_row_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(1-based number, line without LF); None for a line above the limit, which is skipped without being held."""
    pending = bytearray()
    number, is_too_long = 1, False
    chunk = head
    while chunk:
        start = 0
        while (stop := chunk.find(b"\n", start)) >= 0:
            if is_too_long or len(pending) + stop - start > max_row_bytes:
                yield number, None
            else:
                yield number, bytes(pending) + chunk[start:stop]
            pending.clear()
            number, is_too_long, start = number + 1, False, stop + 1
        if not is_too_long:
            pending += chunk[start:]
            if len(pending) > max_row_bytes:
                pending.clear()
                is_too_long = True
        chunk = stream.read(_CHUNK_BYTES)
    if is_too_long or pending:
        yield number, None if is_too_long else bytes(pending)


def _elements(head: bytes, stream: IO[bytes], max_row_bytes: int, *, depth_of_rows: int) -> Iterator[bytes | None]:
    """Values that stand `depth_of_rows` brackets deep, as bytes; None for one above the limit.

    A string counts as a bracket here. Where an object stands around the rows, its strings are keys, and rows
    are its objects and arrays alone.
    """
    depth, in_string, is_too_long, is_list = 0, False, False, True
    element = bytearray()  # what is read of the row at hand; at the rows' own depth, of the bare values between
    chunk, skip = head, 0
    while chunk:
        start, position = 0, skip
        skip = 0
        while found := _STRUCTURE.search(chunk, position):
            byte, position = found.group(), found.end()
            if byte == b"\\":
                if in_string:
                    skip = max(0, position + 1 - len(chunk))
                    position += 1
                continue
            if byte == b'"':
                in_string = not in_string
            elif in_string:
                continue
            if depth == depth_of_rows:
                yield from _bare_values(element + chunk[start : found.start()], is_list, max_row_bytes)
                element.clear()
                start = found.start()
            if in_string or byte in b"{[":
                depth += 1
                if depth == depth_of_rows:
                    is_list, start = byte == b"[", position
                continue
            depth -= 1
            if depth == depth_of_rows:
                element += chunk[start:position]
                if is_list or byte != b'"':
                    yield None if is_too_long or len(element) > max_row_bytes else bytes(element)
                element.clear()
                is_too_long, start = False, position
        if depth == depth_of_rows:
            *whole, cut = _BETWEEN.split(element + chunk[start:])
            yield from _bare_values(b",".join(whole), is_list, max_row_bytes)
            element = bytearray(cut[: max_row_bytes + 1])
        elif depth > depth_of_rows and not is_too_long:
            element += chunk[start:]
            if len(element) > max_row_bytes:
                element.clear()
                is_too_long = True
        chunk = stream.read(_CHUNK_BYTES)
    if depth != 0:
        raise EOFError(f"the JSON text ends {depth} brackets deep")
    yield from _bare_values(element, is_list, max_row_bytes)


def _bare_values(text: bytes | bytearray, is_list: bool, max_row_bytes: int) -> Iterator[bytes | None]:
    """Numbers, null and whatever else stands between rows of a list; none where the text holds keys of an object."""
    for value in _BETWEEN.split(text) if is_list else ():
        if value:
            yield None if len(value) > max_row_bytes else bytes(value)


def _parse(data: bytes | None, where: str, max_row_bytes: int) -> Row:
    if data is None:
        return Row(where=where, problem=too_large(max_row_bytes))
    try:
        text = data.decode()
        return Row(where=where, value=json.loads(text, parse_constant=_refuse_constant, strict=False))
    except UnicodeDecodeError as error:
        return Row(where=where, problem=not_utf8(error, data))
    except (ValueError, RecursionError) as error:
        return Row(where=where, problem=RecordError("bad_json", str(error)))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parses(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8", "surrogateescape"), strict=False)
    except (ValueError, RecursionError):
        return False
    return True
