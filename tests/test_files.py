"""Atomic files, digests and JSON Lines."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from eyas import files
from eyas.errors import ArtifactError, StorageError


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_bytes(path, b"old")
    with pytest.raises(ZeroDivisionError), files.atomic_file(path) as file:
        file.write(b"%d" % (1 // 0))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_a_storage_error_and_leaves_no_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short file must never appear under its final name: https://github.com/atlanhq/application-sdk/pull/3188."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*a\.json: No space left"):
        files.write_bytes(tmp_path / "a.json", b"x" * 100)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_a_files_size_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*a\.json: File too large"):
            files.write_bytes(tmp_path / "a.json", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass_through_unchanged(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(FileExistsError):
        files.write_bytes(blocker / "below", b"x")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_json_lines_split_on_lf_only(tmp_path: Path, separator: str) -> None:
    """Unicode line separators stand inside records: https://github.com/bytedance/deer-flow/pull/5423."""
    path = tmp_path / "rows.jsonl"
    rows = [{"t": f"a{separator}b"}, {"t": "c"}]
    path.write_bytes(b"".join(files.json_line(row) for row in rows))
    read = [(number, json.loads(line)) for number, line in files.read_json_lines(path)]
    assert read == [(1, rows[0]), (2, rows[1])]


def test_blank_lines_keep_the_numbering(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":1}\n\n{"a":2}')
    assert [number for number, _ in files.read_json_lines(path)] == [1, 3]


def test_digest_of_json_ignores_key_order_and_nothing_else() -> None:
    assert files.digest_json({"a": 1, "b": [1, 2]}) == files.digest_json({"b": [1, 2], "a": 1})
    assert files.digest_json({"a": 1}) != files.digest_json({"a": "1"})
    assert files.digest_json([1, 2]) != files.digest_json([2, 1])


def test_digest_of_a_file_is_plain_sha256(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert files.digest_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_broken_and_missing_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"x\.json does not exist"):
        files.read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b'{"a":')
    with pytest.raises(ArtifactError, match=r"x\.json is not JSON"):
        files.read_json(tmp_path / "x.json")
