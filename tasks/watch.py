"""What a look at the runs from outside finds, as alerts: stalls, gates above their warning, disk, servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from blocks.alerts import AlertEvent
from eyas.config import RunConfig, parse_config
from eyas.files import read_json
from eyas.operate.status import RunStatus, read_status
from eyas.workspace import RunFolder
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
        root = path.parent
        status = read_status(root)
        if status.state == "running":
            config = parse_config(read_json(RunFolder(root).run_json)["config"], where=str(path))
            for found in (_stalls(status), _gates(status, config), _disk(status), _servers(status, config)):
                findings += [Finding(root, alert, message) for alert, message in found]
    return findings


def _stalls(status: RunStatus) -> Iterator[tuple[AlertEvent, str]]:
    for phase in status.phases:
        if phase.state == "stalled":
            last = max((message.at for message in phase.progress), default="never")
            yield "run stalled", f"phase {phase.phase} has recorded no progress since {last}"


def _gates(status: RunStatus, config: RunConfig) -> Iterator[tuple[AlertEvent, str]]:
    gates = config.generation.gates
    for dataset in status.datasets:
        for name, gate in gates:
            share = dataset.figures.get(f"gate_{name}")
            if isinstance(share, float) and hasattr(gate, "warn") and share > gate.warn:
                yield (
                    "gate breached",
                    f"{dataset.dataset}: {name} {share:.1%}, warns above {gate.warn:.1%}, stops at {gate.stop:.1%}",
                )


def _disk(status: RunStatus) -> Iterator[tuple[AlertEvent, str]]:
    free, wanted = status.disk["free_bytes"], int(status.forecast.get("disk_bytes_to_write", 0))
    if wanted > free:
        yield "disk low", f"{free:,} bytes are free, {wanted:,} are still to be written"


def _servers(status: RunStatus, config: RunConfig) -> Iterator[tuple[AlertEvent, str]]:
    is_generating = any(phase.phase == "generate" and phase.state in ("running", "stalled") for phase in status.phases)
    if config.server.kind != "sglang" or not is_generating:
        return
    for url in config.server.urls:
        try:
            code = httpx.get(f"{url.rstrip('/')}/ready", timeout=10.0, trust_env=False).status_code
            problem = "" if code == 200 else f"answers {code}"
        except httpx.HTTPError as error:
            problem = f"does not answer ({type(error).__name__})"
        if problem:
            yield "server down", f"{url}/ready {problem}; the other servers go on, and it is taken back when it answers"
