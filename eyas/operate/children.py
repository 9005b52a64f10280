"""Child processes in their own process group, ended with their parent, however it ends.

A child whose parent is killed outright receives a signal from the kernel (Linux), and a shell that waits beside
it for the parent's end kills the rest of its group; on every other way out the whole group is ended here. What the child's own
children start in a session of their own (setsid) is theirs to end. Output goes to a log file, whose last line is quoted
when the child fails.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Reads the group, then a line once that has ended; the end of the pipe instead says that nobody is left to end it.
# $0 is how many times 0.2 s the group's leader has to end by itself.
_WATCH = (
    "read -r group && ! read -r ended || exit; n=$0; "
    'while [ "$n" -gt 0 ] && kill -0 "$group"; do sleep 0.2; n=$((n - 1)); done; kill -9 "-$group"'
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

    `log` (truncated) takes both output streams; None lets the child write to ours. `keeps_group` leaves what
    a finished child started running (a command that starts a server). Call it from a thread that outlives
    the child: the kernel's signal is tied to the starting thread.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    patience = 0 if parent_death_signal is signal.SIGKILL else int(5 * grace_s)
    with _watcher(patience) as watch, open(log if log is not None else os.devnull, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output if log is not None else None,
            stderr=subprocess.STDOUT if log is not None else None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_prepared(parent_death_signal),
        )
        try:
            watch(process.pid)
            yield process
        finally:
            if process.poll() is None or not keeps_group:
                _end_group(process, grace_s)


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
def _watcher(patience: int) -> Iterator[Callable[[int], None]]:
    """Another process that kills the group it is told if this one dies while the block runs."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, str(patience)],
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


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
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
