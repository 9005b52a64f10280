"""What another process of the run says, passed on: its progress messages and the lines of its log.

Each function gives a callable to be called now and then; it passes on what is new since the last call.
What an earlier attempt left behind is never passed on.
"""

from __future__ import annotations

import re
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


_PREFECT_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d+ \| (\w+) +\| [^-]*(?:'[^']*')? - (.*)")
_SHOWN_OTHERWISE = ("View at ", "Beginning flow run ", "Finished in state Completed", "Finished in state Cached")
"""Prefect's own words for what progress and the sentence at a phase's end say."""


def readable(say: Callable[[str], None]) -> Callable[[str], None]:
    """Lines of a flow's log for a person: without Prefect's prefix, warnings named as such, nothing twice. The log keeps all."""

    def pass_on(line: str) -> None:
        if (found := _PREFECT_LINE.fullmatch(line)) is None:
            say(line)
            return
        level, text = found.groups()
        if level != "INFO":
            say(f"{level.lower()}: {text}")
        elif not text.startswith(_SHOWN_OTHERWISE):
            say(text)

    return pass_on


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
