"""A disk that fills up leaves no file at a final name, and says what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas.errors import StorageError
from eyas.hidden.store.shard import write_shard
from eyas.merging.merge import merge
from tests.hidden.tiny import TinyRun


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]).returncode == 0
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_shard_on_a_full_disk_leaves_no_short_file(small_disk: Path) -> None:
    """https://github.com/atlanhq/application-sdk/pull/3188: a short file at its final name, believed ever after."""
    with pytest.raises(StorageError, match="No space left on device; free space"):
        write_shard(small_disk / "shard-a-00000.safetensors", {"aux": torch.zeros(2 << 20, dtype=torch.uint8)})
    assert list(small_disk.iterdir()) == []


def test_a_merge_on_a_full_disk_leaves_no_output(small_disk: Path, tiny: TinyRun) -> None:
    tiny.write_random("a", 4000, longest=300)
    tiny.run.root.mkdir(exist_ok=True)
    tiny.run.merged.symlink_to(small_disk)
    with pytest.raises(StorageError, match="No space left on device; free space"):
        merge(tiny.run, tiny.hidden_config("a"))
    assert [path.name for path in small_disk.iterdir() if not path.name.startswith(".")] == []
