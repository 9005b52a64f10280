"""What a look at the runs from outside finds, as alerts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocks.alerts import AlertEvent
from eyas.operate.status import RunStatus, read_status
from tasks.events import emit


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know about a run."""

    run: Path
    alert: AlertEvent
    message: str

    def tell(self) -> None:
        """Make it an event in Prefect."""
        emit(self.alert, self.run, self.message)


def look(runs: Path) -> list[Finding]:
    """Findings on every run below `runs` that somebody works on now."""
    findings = []
    for path in sorted(runs.glob("*/run.json")):
        status = read_status(path.parent)
        if status.state == "running":
            findings += [Finding(path.parent, _alert(status, alarm), alarm) for alarm in status.alarms]
    return findings


def _alert(status: RunStatus, alarm: str) -> AlertEvent:
    if alarm.startswith("disk"):
        return "disk low"
    if "gates" in alarm:
        return "gate breached"
    return "generation stalled" if "stalled" in alarm else "run failed"
