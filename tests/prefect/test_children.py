"""Child processes of tasks end with their task: the whole group, however the task ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.errors import ConfigError, EyasError, TooManyRejects
from eyas.operate.children import child_process, is_alive
from tasks.children import run_child


def wait_until(condition: object, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.05)


async def pids_in(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 240
    while not path.is_file() or len(path.read_text().split()) < count:
        assert time.monotonic() < deadline, "the child wrote no process ids"
        await asyncio.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


async def test_a_cancelled_task_leaves_no_process_of_the_tree(tmp_path: Path) -> None:
    """https://github.com/PrefectHQ/prefect/issues/20979: a stand-in for a trainer with ranks of its own."""
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    work = asyncio.create_task(run_child(["/bin/sh", "-c", script], log=tmp_path / "log", grace_s=1))
    tree = await pids_in(pids, 2)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    wait_until(lambda: not any(is_alive(pid) for pid in tree))


ELSEWHERE = "setsid sleep 600 & (setsid sh -c 'echo $$ >> {pids}; exec sleep 600' &) ; echo $! >> {pids}; echo $$ >> {pids}; wait"
"""A child in a session of its own, and a daemon whose parent is gone: neither is in the group."""


async def test_what_left_the_group_ends_with_the_task_too(tmp_path: Path) -> None:
    """The same report: shell children that a trainer's launcher starts elsewhere kept the GPU."""
    pids = tmp_path / "pids"
    work = asyncio.create_task(run_child(["/bin/sh", "-c", ELSEWHERE.format(pids=pids)], log=tmp_path / "log", grace_s=1))
    tree = await pids_in(pids, 3)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not any(is_alive(pid) for pid in tree)


def test_what_left_the_group_ends_with_a_task_process_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import asyncio, sys; from pathlib import Path; from tasks.children import run_child; "
        f"asyncio.run(run_child(['/bin/sh', '-c', {ELSEWHERE.format(pids=pids)!r}], log=Path({str(tmp_path / 'log')!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: pids.is_file() and len(pids.read_text().split()) == 3)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_a_server_that_a_finished_command_started_outlives_those_the_command_descends_from(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starts = f"import subprocess; from eyas.operate.children import child_process\nwith child_process(['/bin/sh', '-c', 'sleep 600 & echo $! > {pid_file}'], keeps_group=True) as command: command.wait()"  # noqa: E501
    with child_process([sys.executable, "-c", starts]) as process:
        assert process.wait() == 0
    server = int(pid_file.read_text())
    assert is_alive(server)
    os.kill(server, signal.SIGKILL)


async def test_a_child_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    deaf = "import os, signal, time; [signal.signal(number, signal.SIG_IGN) for number in (2, 15)]; "
    code = deaf + f"open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    work = asyncio.create_task(run_child([sys.executable, "-c", code], log=tmp_path / "log", grace_s=0.5))
    (pid,) = await pids_in(pids, 1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not is_alive(pid)


def test_a_killed_task_process_takes_its_child_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = f"import os,time;open({str(pids)!r},'w').write(str(os.getpid()));time.sleep(600)"
    code = (
        "import asyncio, sys; from pathlib import Path; from tasks.children import run_child; "
        f"asyncio.run(run_child([sys.executable, '-c', {child!r}], log=Path({str(tmp_path / 'log')!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: pids.is_file() and pids.read_text())
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not is_alive(int(pids.read_text())))


@pytest.mark.parametrize(("code", "family"), [(1, EyasError), (2, ConfigError), (3, TooManyRejects)])
async def test_an_exit_code_comes_back_as_its_family_with_the_last_line(tmp_path: Path, code: int, family: type[EyasError]) -> None:
    with pytest.raises(family, match="the reason") as caught:
        await run_child(["/bin/sh", "-c", f"echo first; echo the reason; exit {code}"], log=tmp_path / "log")
    assert type(caught.value) is family
