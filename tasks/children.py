"""A child process awaited by a task: ended with the task, however it ends.

Cancelling the task ends the child's whole process group on the way out; a task process that is killed
outright takes the child with it (the kernel's parent-death signal).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import ConfigError, EyasError, TooManyRejects
from eyas.operate.children import child_process, last_lines

_EXIT_ERRORS: dict[int, type[EyasError]] = {ConfigError.exit_code: ConfigError, TooManyRejects.exit_code: TooManyRejects}


async def run_child(command: Sequence[str], *, log: Path, grace_s: float = 15.0, poll_s: float = 0.2) -> None:
    """Run a command to its end; raises `EyasError` that quotes the log's last line if it fails.

    Exit codes 2 and 3 of Eyas' own entry points come back as `ConfigError` and `TooManyRejects`.
    """
    with child_process(list(command), log=log, grace_s=grace_s) as process:
        while process.poll() is None:  # noqa: ASYNC110 the loop's child watcher would race the context's own wait
            await asyncio.sleep(poll_s)
    if process.returncode != 0:
        error = _EXIT_ERRORS.get(process.returncode, EyasError)
        quoted = last_lines(log) or "no output"
        raise error(f"{' '.join(command[1:4])} … ended with exit code {process.returncode}: {quoted} (log {log})")
