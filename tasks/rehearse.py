"""What the first replies tell of the phases to come: the rehearsal, the codec probe and the learning curve, as tasks."""

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


@task(name="probe codecs", task_run_name="probe codecs")
def measure_codecs(run: Path, config: RunConfig) -> dict[str, Any]:
    """Measure on the first replies what smaller hidden states keep of this target; tried once."""
    from eyas.operate.codec_probe import probe_codecs

    return probe_codecs(RunFolder(run), config)


@task(name="learning curve", task_run_name="learning curve")
def measure_learning_curve(run: Path, config: RunConfig) -> dict[str, Any]:
    """Train on the first replies and say what the rest will buy; tried once, and a later run continues it."""
    from eyas.operate.learning_curve import learning_curve

    return learning_curve(RunFolder(run), config)
