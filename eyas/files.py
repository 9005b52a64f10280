"""Files that are whole or absent, digests, and JSON Lines split on LF bytes only.

A reader never sees a half-written file: content goes to a temporary name in the same folder, is
flushed and fsynced, renamed over the final name, and the folder is fsynced.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from eyas.errors import ArtifactError, StorageError

SEAL = "sha256_of_the_rest"
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Translate an operating system's refusal to write `path` into `StorageError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRNOS:
            raise
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free space or mend its limits or permissions, then run the same command again"
        ) from error


@contextmanager
def atomic_file(path: Path, *, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path`; on a clean exit it becomes `path`, otherwise it is removed.

    Raises `StorageError` where the disk is full, failing, read-only or forbids writing, or a limit is reached (`ulimit -f`).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    encoding = None if "b" in mode else "utf-8"
    newline = None if "b" in mode else "\n"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, mode, encoding=encoding, newline=newline) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write `value` as UTF-8 JSON with sorted keys to `path` atomically; NaN and infinity are refused."""
    write_bytes(path, json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raises `ArtifactError` naming the file if it is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist; run the phase that writes it first") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}); remove it and run its phase again") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error}); remove it and run the phase that writes it again") from error


def write_sealed(path: Path, value: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON object with the digest of its own content, so that `read_sealed` finds every later change."""
    plain = json.loads(json.dumps(value))  # as it will be read: text for keys, lists for tuples
    write_json(path, {**plain, SEAL: digest_json(plain)}, indent=indent)


def read_sealed(path: Path) -> Any:
    """Read what `write_sealed` wrote; raises `ArtifactError` if it is missing, not JSON or was changed since.

    A file without a digest, as earlier versions wrote it, passes.
    """
    value = read_json(path)
    seal = value.pop(SEAL, None) if isinstance(value, dict) else None
    if seal is not None and digest_json(value) != seal:
        raise ArtifactError(f"{path} was changed after it was written, by hand or by damage; run the phase that writes it again")
    return value


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces), in hex."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def json_line(value: Any) -> bytes:
    """One JSON Lines row: compact UTF-8 JSON and a final LF."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based line number, raw line without LF) of every non-blank line; splits on LF bytes only."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.rstrip(b"\n")
            if line.strip():
                yield number, line
