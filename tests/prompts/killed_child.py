"""A process that prepares prompts in forked children, each killed at a numbered file operation inside the run folder.

Reads lines `CONFIG RUN KILL_AT` on stdin; answers each with the number of operations seen, or `killed`.
Forking from a process that has loaded everything saves the seconds of imports for each kill.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pandas  # noqa: F401  pyarrow imports it on first use; here once, before the forks

from eyas.config import RunConfig
from eyas.prompts.preparation import load_preparation
from eyas.prompts.prepare import prepare
from eyas.workspace import RunFolder

_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def main() -> None:
    for line in sys.stdin:
        config, run, kill_at = line.split()
        load_preparation(RunConfig.model_validate_json(Path(config).read_text()))  # kept by the forked child
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            seen = _prepare(Path(config), Path(run), int(kill_at))
            os.write(writer, str(seen).encode())
            os._exit(0)
        os.close(writer)
        answer = os.read(reader, 32).decode()
        os.close(reader)
        _, status = os.waitpid(child, 0)
        print(answer or ("killed" if os.WIFSIGNALED(status) else "failed"), flush=True)


def _prepare(config: Path, run: Path, kill_at: int) -> int:
    seen = 0
    marker = str(run)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _OPERATIONS and any(marker in str(argument) for argument in arguments[:2]):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    prepare(RunFolder(run), RunConfig.model_validate_json(config.read_text()))
    return seen


if __name__ == "__main__":
    main()
