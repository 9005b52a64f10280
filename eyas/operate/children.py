"""Child processes in their own process group, ended with their parent, however it ends.

A child whose parent is killed outright receives a signal from the kernel (Linux), and a shell that waits beside
it for the parent's end kills the rest of its group; on every other way out the whole group is ended here. What leaves
the group (setsid, a daemon) is found by a mark in the environment that all descendants inherit. Output goes to a log
file, whose last line is quoted when the child fails.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TREE = "EYAS_TREE"
"""Environment variable: the marks of all child processes that a process descends from."""
# Reads the group, then a line once that has ended; the end of the pipe instead says that nobody is left to end it.
# $0 is how many times 0.2 s the group's leader has to end by itself, $1 the mark of those who left the group.
_WATCH = (
    "read -r group && ! read -r ended || exit; n=$0; "
    'while [ "$n" -gt 0 ] && kill -0 "$group"; do sleep 0.2; n=$((n - 1)); done; kill -9 "-$group"; '
    'for file in /proc/[0-9]*/environ; do grep -qs "$1" "$file" && pid=${file#/proc/} && kill -9 "${pid%/environ}"; done'
)


@contextmanager
def child_process(
    command: list[str],
    *,
    log: Path | None = None,
    parent_death_signal: signal.Signals = signal.SIGKILL,
    grace_s: float = 60.0,
    keeps_group: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` while the block runs; on the way out its group gets SIGINT, after `grace_s` seconds SIGKILL.

    `log` (truncated) takes both output streams; None lets the child write to ours. `keeps_group` leaves what a finished
    child started running (a command that starts a server), also when those end that the command descends from. Call it
    from a thread that outlives the child: the kernel's signal is tied to the starting thread.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    patience = 0 if parent_death_signal is signal.SIGKILL else int(5 * grace_s)
    mark = secrets.token_hex(8)
    marks = mark if keeps_group else f"{os.environ.get(_TREE, '')} {mark}".strip()
    with _watcher(patience, mark) as watch, open(log if log is not None else os.devnull, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output if log is not None else None,
            stderr=subprocess.STDOUT if log is not None else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_prepared(parent_death_signal),
            env={**os.environ, _TREE: marks},
        )
        try:
            watch(process.pid)
            yield process
        finally:
            if process.poll() is None or not keeps_group:
                _end_group(process, grace_s, mark)


def wait_for(process: subprocess.Popen[bytes], while_waiting: Callable[[], None], *, every_s: float = 0.5) -> int:
    """Wait for the child's end, calling `while_waiting` every `every_s` seconds and once at the end; its exit code."""
    while True:
        try:
            code = process.wait(timeout=every_s)
        except subprocess.TimeoutExpired:
            while_waiting()
            continue
        while_waiting()
        return code


def last_lines(log: Path, count: int = 1) -> str:
    """The last `count` lines of a log that hold anything, or "" where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return "\n".join(lines[-count:])


def is_alive(pid: int) -> bool:
    """True if a process of this number runs on this machine (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _prepared(death_signal: signal.Signals) -> Callable[[], None]:
    """What the child does before it becomes the command: hears SIGINT (a shell's `&` has it ignored), dies with its parent."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None  # before the fork: nothing may be loaded after it
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(death_signal))
            if os.getppid() != parent:  # it died between fork and prctl
                os._exit(1)

    return prepare


@contextmanager
def _watcher(patience: int, mark: str) -> Iterator[Callable[[int], None]]:
    """Another process that kills the group it is told, and whoever bears `mark`, if this one dies while the block runs."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, str(patience), mark],
        env={name: value for name, value in os.environ.items() if name != _TREE},  # it must outlive those it ends
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert shell.stdin is not None
    pipe = shell.stdin

    def watch(group: int) -> None:
        pipe.write(b"%d\n" % group)
        pipe.flush()

    try:
        yield watch
    finally:
        shell.communicate(b"ended\n")


def _end_group(process: subprocess.Popen[bytes], grace_s: float, mark: str) -> None:
    """SIGINT and patience, then SIGKILL to all that is left; a second Ctrl-C ends the patience at once."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the child left behind in its group
        process.wait()
        for _ in range(50):  # what forks while it is looked at is found in the next round
            if not (strays := _marked(mark)):
                break
            for pid in strays:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    """Living processes of ours whose environment holds `mark` (Linux; elsewhere none are found)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if is_alive(pid)]
