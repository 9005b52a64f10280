"""Progress messages as the run folder keeps them: the last of each piece of work, and the thinned history."""

from __future__ import annotations

import socket
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import ArtifactError
from eyas.files import read_json
from eyas.operate.children import is_alive
from eyas.progress import HISTORY_NAME, Progress


class ProgressMessage(BaseModel):
    """The last recorded message of one piece of work."""

    model_config = ConfigDict(extra="ignore")

    stage: str
    name: str = ""
    done: int
    total: int
    unit: str
    figures: dict[str, float | int | str] = Field(default_factory=dict)
    is_final: bool = False
    at: str
    pid: int = 0
    host: str = ""
    started_at: str = ""

    def progress(self) -> Progress:
        """The message as the phase sent it."""
        return Progress(
            stage=self.stage,
            name=self.name,
            done=self.done,
            total=self.total,
            unit=self.unit,
            figures=self.figures,
            is_final=self.is_final,
        )

    def age_s(self, now: datetime) -> float:
        """Seconds since the message."""
        return (now - datetime.fromisoformat(self.at)).total_seconds()

    @property
    def remaining_s(self) -> float | None:
        """Seconds left: what the phase states, None if that is a word; otherwise in proportion to what is done after 20 s."""
        stated = self.figures.get("remaining_s")
        if self.is_final:
            return 0.0
        if stated is not None:
            return None if isinstance(stated, str) else float(stated)
        elapsed_s = (datetime.fromisoformat(self.at) - datetime.fromisoformat(self.started_at or self.at)).total_seconds()
        return elapsed_s * (self.total - self.done) / self.done if self.done and elapsed_s > 20 else None

    @property
    def has_live_process(self) -> bool:
        """True if the process that sent it runs; another machine's processes count as running."""
        return self.host not in ("", socket.gethostname()) or is_alive(self.pid)


def read_progress(folder: Path, stage: str = "") -> list[ProgressMessage]:
    """The last message of each piece of work, of `stage` only if given; unreadable files are passed over."""
    messages = []
    for path in sorted(folder.glob("*.json")):
        try:
            message = ProgressMessage.model_validate(read_json(path))
        except (ArtifactError, ValidationError):  # being replaced, or not ours: progress is never data
            continue
        if stage in ("", message.stage):
            messages.append(message)
    return messages


def read_history(folder: Path) -> list[ProgressMessage]:
    """The thinned series of messages, oldest first; a torn line is passed over."""
    try:
        lines = (folder / HISTORY_NAME).read_bytes().split(b"\n")
    except OSError:
        return []
    messages = []
    for line in lines:
        try:
            messages.append(ProgressMessage.model_validate_json(line))
        except ValidationError:
            continue
    return messages
