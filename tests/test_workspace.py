"""The run folder and its lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.workspace import RunFolder, exclusive


def test_a_file_in_the_way_is_refused_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "runs").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run folder .*runs/a cannot be written"):
        RunFolder(tmp_path / "runs" / "a").create()


def test_a_second_process_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    lock = tmp_path / "journal.lock"
    program = (
        "import sys; from pathlib import Path; from eyas.workspace import exclusive\n"
        f"with exclusive(Path({str(lock)!r}), 'the journal'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"the journal is in use by process {holder.pid} "), exclusive(lock, "the journal"):
            pass
        holder.kill()
    with exclusive(lock, "the journal"):  # the kernel released it with the process
        assert lock.read_text() != str(holder.pid)
