"""Waiting locks: several extractors share one store, and the kernel frees what a dead one held."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` while the block runs; yields False at once if it is taken and `waits` is false."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
