"""What another process of the run says, passed on: its progress messages and the lines of its log.

Each function gives a callable to be called now and then; it passes on what is new since the last call.
What an earlier attempt left behind is never passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from eyas.operate.messages import read_progress
from eyas.progress import Report


def follow_progress(folder: Path, report: Report, *, stage: str = "") -> Callable[[], None]:
    """Pass new messages in the progress folder (of `stage` only, if given) to `report`."""
    seen = {(message.stage, message.name): message for message in read_progress(folder, stage)}

    def look() -> None:
        for message in read_progress(folder, stage):
            key = (message.stage, message.name)
            if seen.get(key) != message:
                seen[key] = message
                report(message.progress())

    return look


def follow_log(log: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """Pass whole new lines of a log that is being written to `say`."""
    position = 0

    def look() -> None:
        nonlocal position
        try:
            with open(log, "rb") as file:
                file.seek(position)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        position += len(whole)
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            say(line)

    return look
