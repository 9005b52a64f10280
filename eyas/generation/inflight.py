"""Which requests are on which server right now, in a file that survives a crash of this process.

A killed client leaves its requests running on the servers, each holding KV memory until its last token. The
next start reads this file and aborts them by `rid`. Lines are written without fsync: the page cache outlives
a killed process, and after a power cut the servers' requests are gone as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from eyas.files import storage_errors


class InFlightLog:
    """Appends `+rid url` and `-rid`. Read `left_over` before `open`, which starts a fresh file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[str, str] = {}
        self._num_lines = 0

    def left_over(self) -> dict[str, str]:
        """{rid: url} of the requests that an earlier process did not end."""
        return _read(self._path)

    def open(self) -> None:
        with storage_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)

    def add(self, rid: str, url: str) -> None:
        self._live[rid] = url
        self._write(f"+{rid} {url}\n")

    def remove(self, rid: str) -> None:
        self._live.pop(rid, None)
        self._write(f"-{rid}\n")
        if self._num_lines > 10_000 + 4 * len(self._live):
            self._compact()

    def close(self) -> None:
        os.close(self._file)

    def _write(self, line: str) -> None:
        self._num_lines += 1
        try:
            os.write(self._file, line.encode())
        except OSError:
            return  # a full disk: the journal reports it; here it costs an abort at most

    def _compact(self) -> None:
        os.ftruncate(self._file, 0)
        self._num_lines = 0
        for rid, url in self._live.items():
            self._write(f"+{rid} {url}\n")


def _read(path: Path) -> dict[str, str]:
    live: dict[str, str] = {}
    if not path.is_file():
        return live
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        rid, _, url = line[1:].partition(" ")
        if line.startswith("+") and url:
            live[rid] = url
        elif line.startswith("-"):
            live.pop(rid, None)
    return live
