"""The journal: durable lines, torn tails, one writer, a full disk that pauses and loses nothing.

- torn tails: https://github.com/Tracer-Cloud/opensre/issues/6356, https://github.com/PrimeIntellect-ai/verifiers/pull/1376,
  https://github.com/huggingface/OpenEnv/pull/1154
- a full disk: https://github.com/atlanhq/application-sdk/pull/3188
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from eyas.errors import ArtifactError, ConfigError, StorageError
from eyas.generation.journal import Journal, cut_torn_tail, parse_line, read_journal, sealed

WHOLE = b'{"id":"1"}\n{"id":"2","t":"\xe2\x80\xa8"}\n'


@pytest.mark.parametrize(
    "tail", [b"", b'{"id":"7","te', b'{"id":"7","t":"\xe2', b'{"id":"7","t":"\xe2\x80', b'{"id":"7"}', b"\n{", b" "]
)
def test_a_torn_tail_is_cut_and_whole_lines_stay(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(WHOLE + tail)
    cut_torn_tail(path)
    assert [json.loads(line)["id"] for _, _, line in read_journal(path)] == ["1", "2"]
    assert path.read_bytes().endswith(b"\n")


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 200_000)
    assert cut_torn_tail(path) == 200_000
    assert path.read_bytes() == b""


def test_a_damaged_middle_line_names_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"id":"1"}\n{"id":\n{"id":"3"}\n')
    lines = list(read_journal(path))
    assert len(lines) == 3
    with pytest.raises(ArtifactError, match="byte 11"):
        parse_line(path, lines[1][0], lines[1][2])


@pytest.mark.parametrize("line", [b"[]", b'"7"', b'{"x":1}', b'{"id":7}', b'{"id":"\xe2"}', b"null"])
def test_a_whole_line_that_is_no_record_is_named_and_never_joined(line: bytes, tmp_path: Path) -> None:
    """https://github.com/huggingface/OpenEnv/pull/1154: not UTF-8, no object, no id; its neighbours stay readable."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(WHOLE + line + b"\n")
    assert cut_torn_tail(path) == 0
    with open(path, "ab") as file:
        file.write(b'{"id":"9"}\n')
    *_, (offset, _, bad), (_, _, last) = read_journal(path)
    with pytest.raises(ArtifactError, match=f"byte {len(WHOLE)}"):
        parse_line(path, offset, bad)
    assert parse_line(path, 0, last)["id"] == "9"


def test_any_byte_that_is_not_what_was_written_is_found(tmp_path: Path) -> None:
    """A digit that was edited, or a bit that flipped on the disk, would still be JSON and another training token."""
    line = sealed(b'{"id":"7","output_ids":[41,5]}')
    assert parse_line(tmp_path, 0, line) == {"id": "7", "output_ids": [41, 5], "crc": json.loads(line)["crc"]}
    for position in range(len(line)):
        for bit in (1, 2, 16):
            changed = bytearray(line)
            changed[position] ^= bit
            with contextlib.suppress(ArtifactError):  # raised but where the checksum's own name was hit
                value = parse_line(tmp_path, 0, bytes(changed))
                assert b',"crc":"' not in changed
                assert (value["id"], value["output_ids"]) == ("7", [41, 5])


def test_a_line_without_a_checksum_is_taken_as_earlier_versions_wrote_it(tmp_path: Path) -> None:
    assert parse_line(tmp_path, 0, b'{"id":"7","output_ids":[41,5]}')["output_ids"] == [41, 5]


def test_opening_a_long_journal_reads_its_tail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same report: its first mend read the whole file at every append, 156 ms at 100,000 records."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"id":"1","t":"%s"}\n' % (b"x" * 1000) * 20_000)
    before = psutil.Process().io_counters().read_chars
    cut_torn_tail(path)
    assert psutil.Process().io_counters().read_chars - before < 1_000_000


async def test_appends_are_durable_in_order_and_share_syncs(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with Journal(path) as journal:
        lines = [f'{{"id":"{number}"}}\n'.encode() for number in range(500)]
        offsets = await asyncio.gather(*(journal.append(line) for line in lines))
        assert path.read_bytes() == b"".join(lines)
        assert journal.num_syncs < 50
    raw = path.read_bytes()
    assert all(raw[offset:].startswith(line) for offset, line in zip(offsets, lines, strict=True))


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.jsonl"):
        with pytest.raises(ConfigError, match="in use by process"):
            async with Journal(tmp_path / "journal.jsonl"):
                pass


class FullDisk:
    """Stands before a journal's file: takes half of each write, then refuses, until there is space again."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.is_full = True

    async def write(self, data: bytes) -> int:
        if not self.is_full:
            return await self.file.write(data)
        if len(data) > 4:
            return await self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


async def test_a_full_disk_pauses_and_loses_nothing(tmp_path: Path) -> None:
    path, told = tmp_path / "journal.jsonl", []
    async with Journal(path, retry_s=0.01, on_pause=told.append) as journal:
        await journal.append(b'{"id":"1"}\n')
        disk = journal._file = FullDisk(journal._file)
        waiting = asyncio.create_task(journal.append(b'{"id":"2"}\n'))
        async with asyncio.timeout(240):
            while not told:
                await asyncio.sleep(0)
        assert isinstance(told[0], StorageError)
        assert "No space left" in str(told[0])
        assert not waiting.done()
        disk.is_full = False
        await waiting
    assert path.read_bytes() == b'{"id":"1"}\n{"id":"2"}\n'
    assert told[-1] is None


async def test_a_disk_that_stays_full_fails_with_a_typed_error_and_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    async with Journal(path, retry_s=0.001, give_up_s=0.02) as journal:
        await journal.append(b'{"id":"1"}\n')
        journal._file = FullDisk(journal._file)
        with pytest.raises(StorageError, match="No space left"):
            await journal.append(b'{"id":"2"}\n')
    assert path.read_bytes() == b'{"id":"1"}\n'
