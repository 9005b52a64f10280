"""The journal of a dataset: every outcome appended, flushed and fsynced before it counts.

One writer per file, held by a lock with its pid. Appends are grouped: while one fsync runs the next lines
gather, so a thousand records a second cost as many fsyncs as the disk can do. A torn tail (a crash inside a
line, or inside a UTF-8 character) is cut on open. A full disk cuts the half-written group away again, tells
`on_pause` and tries once more until space returns: nothing that was promised is lost, nothing is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiofiles
import orjson

from eyas.errors import ArtifactError, StorageError
from eyas.files import fsync_folder, storage_errors
from eyas.workspace import exclusive

log = logging.getLogger(__name__)

_TAIL_BLOCK = 1 << 16
_SEAL_BYTES = len(b',"crc":"00000000"}')


class Journal:
    """An append-only JSON Lines file; an async context manager. `append` returns once the line is on disk."""

    def __init__(
        self,
        path: Path,
        *,
        retry_s: float = 5.0,
        give_up_s: float = 3600.0,
        on_pause: Callable[[StorageError | None], None] = lambda error: None,
    ) -> None:
        self.path = path
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._on_pause = on_pause
        self._lines: list[bytes] = []
        self._waiting: list[asyncio.Future[int]] = []
        self._has_work = asyncio.Event()
        self.size_bytes = 0
        self._stack = ExitStack()
        self._writer: asyncio.Task[None] | None = None
        self._failure: StorageError | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_paused = False
        self.num_syncs = 0

    async def __aenter__(self) -> Journal:
        with storage_errors(self.path):
            self._stack.enter_context(exclusive(self.path.with_suffix(".lock"), f"journal {self.path}"))
            self.num_cut_bytes = cut_torn_tail(self.path)
            self.size_bytes = self.path.stat().st_size
            self._file = await aiofiles.open(self.path, "ab", buffering=0)
            fsync_folder(self.path.parent)
        if self.num_cut_bytes:
            log.warning("torn tail cut path=%s bytes=%d", self.path, self.num_cut_bytes)
        self._writer = asyncio.create_task(self._write_groups(), name=f"journal {self.path.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if not self.is_paused:
                await self._is_idle.wait()
            if self._writer is not None:
                self._writer.cancel()
                await asyncio.gather(self._writer, return_exceptions=True)
            await self._file.close()
        finally:
            self._stack.close()

    async def append(self, line: bytes) -> int:
        """Write one line (with its final LF) durably; returns its byte offset. Raises `StorageError` once space stays away."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lines.append(line)
        self._waiting.append(future)
        self._is_idle.clear()
        self._has_work.set()
        return await future

    async def _write_groups(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            lines, waiting = self._lines, self._waiting
            self._lines, self._waiting = [], []
            try:
                await self._write_until_durable(b"".join(lines))
            except StorageError as error:
                self._failure = error
                for future in [*waiting, *self._waiting]:
                    if not future.done():
                        future.set_exception(error)
                self._is_idle.set()
                return
            for line, future in zip(lines, waiting, strict=True):
                if not future.done():
                    future.set_result(self.size_bytes)
                self.size_bytes += len(line)
            if not self._lines:
                self._is_idle.set()

    async def _write_until_durable(self, group: bytes) -> None:
        started = time.monotonic()
        while True:
            try:
                with storage_errors(self.path):
                    await self._write_once(group)
            except StorageError as error:
                await asyncio.to_thread(os.truncate, self.path, self.size_bytes)
                if time.monotonic() - started > self._give_up_s:
                    raise
                if not self.is_paused:
                    log.error("journal paused error=%s", error)
                    self.is_paused = True
                    self._on_pause(error)
                await asyncio.sleep(self._retry_s)
            else:
                if self.is_paused:
                    log.warning("journal resumed path=%s", self.path)
                    self.is_paused = False
                    self._on_pause(None)
                return

    async def _write_once(self, group: bytes) -> None:
        view = memoryview(group)
        while view:
            written = await self._file.write(view)
            view = view[written:]
        await asyncio.to_thread(os.fsync, self._file.fileno())
        self.num_syncs += 1


def cut_torn_tail(path: Path) -> int:
    """Cut what follows the last LF of `path` (created if absent); returns the number of bytes cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - _TAIL_BLOCK)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                end = start + position + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())
        return size - end


def read_journal(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, length, line without LF) of every line; an unfinished last line is left out."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield offset, len(line), line[:-1]
            offset += len(line)


def sealed(data: bytes) -> bytes:
    """A JSON object with the CRC-32 of its bytes as a last member `crc`, eight hexadecimal digits."""
    return b'%s,"crc":"%08x"}' % (data[:-1], zlib.crc32(data))


def parse_line(path: Path, offset: int, line: bytes) -> dict[str, object]:
    """One journal line as an object; raises `ArtifactError` naming file and offset if it is damaged.

    A line without a checksum, as earlier versions wrote them, is taken as it stands.
    """
    if line[-_SEAL_BYTES:].startswith(b',"crc":"') and sealed(line[:-_SEAL_BYTES] + b"}") != line:
        raise ArtifactError(f"{path} at byte {offset}: a line inside the journal is not what was written (its checksum differs)")
    try:
        value = orjson.loads(line)
    except ValueError as error:
        raise ArtifactError(f"{path} at byte {offset}: a line inside the journal is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise ArtifactError(f"{path} at byte {offset}: a line of the journal has no id")
    return value
