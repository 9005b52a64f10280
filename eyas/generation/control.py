"""What an operator may change while a session runs: pause, servers to add, servers to drain.

`control.json` in the run folder is read every second; a wrong file is reported and ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import Field, ValidationError

from eyas.errors import ArtifactError
from eyas.files import read_json, write_json
from eyas.settings import ServerUrl, Settings

log = logging.getLogger(__name__)

CONTROL_NAME = "control.json"


class Control(Settings):
    """The operator's wishes for a running session."""

    paused: bool = Field(default=False, description="True sends nothing new; what is in flight finishes.")
    add_urls: list[ServerUrl] = Field(default_factory=list, description="Servers that join the pool.")
    drain_urls: list[str] = Field(default_factory=list, description="Servers that finish what they hold and get nothing new.")


def read_control(root: Path) -> Control:
    """The wishes in a run folder, the defaults where there are none; raises `ArtifactError` on a wrong file."""
    path = root / CONTROL_NAME
    if not path.is_file():
        return Control()
    try:
        return Control.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ArtifactError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; correct it or remove the file") from error


def write_control(root: Path, control: Control) -> None:
    """Ask the session that runs in `root` for something; it obeys within a second."""
    write_json(root / CONTROL_NAME, control.model_dump())
