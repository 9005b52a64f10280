"""A forked process that works in a run and may end itself by SIGKILL at its N-th change on disk."""

from __future__ import annotations

import builtins
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


def start(work: Callable[[], object], kill_at: int = 0) -> int:
    """Fork a child that runs `work`; with `kill_at` N it is killed when it makes its N-th change; returns its pid.

    A change is: a file opened for writing, a rename, an unlink, a folder made, an fsync, before and after each.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if kill_at:
            _kill_at_change(kill_at)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(pid: int) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_at_change(limit: int) -> None:
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **named: Any) -> Any:
            tick()
            result = function(*given, **named)
            tick()
            return result

        return wrapper

    def open_counted(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        opened = real_open(file, mode, *given, **named)
        if any(letter in mode for letter in "wa+"):
            tick()
        return opened

    real_open = builtins.open
    builtins.open = open_counted
    for name in ("replace", "unlink", "fsync", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
