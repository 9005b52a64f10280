"""The rehearsal of the later phases on the first replies, as a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from eyas.config import RunConfig
from eyas.workspace import RunFolder


@task(name="rehearse", task_run_name="rehearse")
def rehearse_phases(run: Path, config: RunConfig) -> dict[str, Any]:
    """Merge, extract, train and export the first replies, small; tried once, for a failure is the finding."""
    from eyas.operate.rehearsal import rehearse

    return rehearse(RunFolder(run), config)
