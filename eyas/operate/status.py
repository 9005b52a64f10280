"""What a run folder says about the run: phases, datasets, disk, alarms. Reads the folder and nothing else.

So it answers from another shell, on another machine that mounts the folder, and after a crash. A manifest
says what is done; the last progress message of each piece says what moves, and its process number
whether anybody still works on it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from eyas.errors import ArtifactError, ConfigError
from eyas.files import read_json, read_json_lines
from eyas.manifest import Counts, Manifest, load_manifest, verify_manifest
from eyas.operate.children import is_alive
from eyas.operate.messages import ProgressMessage, read_progress
from eyas.operate.phases import PHASES, Phase, phase_folders, phase_of_stage
from eyas.workspace import RunFolder

_RESULTS = ("accept_length", "predicted_accept_length", "baselines", "speedup", "timing", "outputs", "deployment")
_RECORD_UNITS = {"records", "prompts", "rows"}

PhaseState = Literal["waiting", "running", "stalled", "stopped", "failed", "damaged", "outdated", "done"]
"""stopped: begun, and nobody works on it; damaged: a file is not what its manifest says; outdated: its inputs have changed."""


class PhaseStatus(BaseModel):
    """Where one phase stands; `counts` as in its manifests, summed over datasets."""

    phase: Phase
    state: PhaseState
    counts: dict[str, int] = Field(default_factory=dict)
    rejected_by_reason: dict[str, int] = Field(default_factory=dict)
    started_at: str = ""
    finished_at: str = ""
    worked_s: float | None = None
    """Seconds in which at least one of its pieces was made, once all are: what lies between them, such as a week, is no work."""
    message: str = ""
    progress: list[ProgressMessage] = Field(default_factory=list)


class DatasetStatus(BaseModel):
    """One dataset: prompts, responses, and the latest figures of its generation."""

    dataset: str
    prompts: dict[str, int] = Field(default_factory=dict)
    responses: dict[str, int] = Field(default_factory=dict)
    figures: dict[str, Any] = Field(default_factory=dict)


class RunStatus(BaseModel):
    """The whole answer of `eyas status --json`."""

    run: str
    name: str
    state: Literal["new", "running", "stopped", "failed", "done"]
    at: str
    phases: list[PhaseStatus]
    datasets: list[DatasetStatus]
    disk: dict[str, int]
    forecast: dict[str, Any] = Field(default_factory=dict)
    decisions: list[dict[str, Any]] = Field(default_factory=list)
    alarms: list[str] = Field(default_factory=list)
    servers: list[dict[str, Any]] = Field(default_factory=list)
    results: dict[str, Any] = Field(default_factory=dict)


def read_status(root: Path, *, work: dict[str, dict[str, Any]] | None = None) -> RunStatus:
    """Read the run folder `root`; raises `ConfigError` if it holds no run.

    `work` says who works on which phase; unset takes it from the plan in the folder.
    """
    run = RunFolder(root)
    if not run.run_json.is_file():
        raise ConfigError(f"{root} holds no run (no run.json); give the folder of a run that was started")
    try:
        config = read_json(run.run_json)["config"]
        run_name, names = config["name"], [dataset["name"] for dataset in config["prompts"]["datasets"]]
        stall_s = float(config["operate"]["stall_s"])
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise TypeError("a dataset's name is no name of a folder")
    except (ArtifactError, TypeError, KeyError, ValueError) as error:
        raise damaged_run(run) from error
    plan = _optional_json(run.plan_json)
    messages = read_progress(run.progress)
    now = datetime.now(UTC)
    work = work_of(plan) if work is None else work
    phases = [_phase_status(run, phase, names, messages, work.get(phase, {}), now, stall_s) for phase in PHASES]
    datasets = [_dataset_status(run, name, messages) for name in names]
    disk = {"used_bytes": used_bytes(root), "free_bytes": shutil.disk_usage(root).free}
    forecast = plan.get("forecast", {})
    results = _optional_json(run.benchmark / "results.json") if phases[-1].state == "done" else {}
    return RunStatus(
        run=str(root),
        name=run_name,
        state=_run_state(phases),
        at=now.isoformat(timespec="seconds"),
        phases=phases,
        datasets=datasets,
        disk=disk,
        forecast=forecast,
        decisions=plan.get("decisions", []),
        alarms=_alarms(run, phases, disk, forecast),
        servers=_optional_json(run.progress / "servers.json").get("servers", []) if _is_generating(phases) else [],
        results={key: results[key] for key in _RESULTS if key in results},
    )


def damaged_run(run: RunFolder) -> ConfigError:
    """What is wrong when `run.json` does not hold a run's config."""
    return ConfigError(f"{run.run_json} does not hold the config of a run; start the run again with its --config FILE")


def work_of(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Per phase, what only the plan knows: the process that works on it, or the message with which it failed.

    A plan of another shape knows nothing: it is written anew from what lies on disk.
    """
    items = plan.get("phases", [])
    items = [item for item in items if isinstance(item, dict) and "phase" in item] if isinstance(items, list) else []
    return {item["phase"]: item.get("work", {}) for item in items}


def used_bytes(root: Path) -> int:
    """Bytes that the files of a folder take."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total


def _phase_status(
    run: RunFolder,
    phase: Phase,
    datasets: list[str],
    messages: list[ProgressMessage],
    work: dict[str, Any],
    now: datetime,
    stall_s: float,
) -> PhaseStatus:
    manifests: list[Manifest] = []
    trouble = ""
    folders = phase_folders(run, phase, datasets)
    for folder in folders:
        if not (folder / "manifest.json").is_file():
            continue
        try:
            manifests.append(verify_manifest(folder, checks_digests=phase == "bench"))  # its figures are shown, its files small
        except ArtifactError as error:
            trouble = str(error)
    pieces = [message for message in messages if phase_of_stage(message.stage) == phase]
    is_done = bool(folders) and len(manifests) == len(folders) and all(manifest.is_complete for manifest in manifests)
    live = [piece for piece in pieces if not piece.is_final and piece.has_live_process]
    state: PhaseState
    if live:
        state = "running" if any(piece.age_s(now) < stall_s for piece in live) else "stalled"
    elif _is_worked_on(work):
        state = "running"
    elif trouble:
        state = "damaged"
    elif work.get("message") and not (is_done and work["finished_at"] < max(manifest.finished_at for manifest in manifests)):
        state, trouble = "failed", work["message"]  # also one that is complete, with too many rejects
    elif is_done:
        state = "outdated" if any(_is_outdated(run, manifest) for manifest in manifests) else "done"
    else:
        state = "stopped" if pieces or manifests else "waiting"
    counted = [manifest for manifest in manifests if manifest.stage != "export"]  # that one counts a model, not records
    reasons: dict[str, int] = {}
    for manifest in counted:
        for reason, count in manifest.rejected_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return PhaseStatus(
        phase=phase,
        state=state,
        counts=_sum_counts([manifest.counts for manifest in counted]) if is_done else _moving_counts(counted, pieces),
        rejected_by_reason=reasons,
        started_at=min([manifest.started_at for manifest in manifests if manifest.started_at] or [work.get("started_at", "")]),
        finished_at=max([manifest.finished_at for manifest in manifests], default="") if is_done else "",
        worked_s=covered_s([(manifest.started_at, manifest.finished_at) for manifest in manifests]) if is_done else None,
        message=trouble,
        progress=pieces if state in ("running", "stalled", "stopped") else [],
    )


def covered_s(spans: list[tuple[str, str]]) -> float | None:
    """Seconds that `spans` (start, end; ISO 8601) cover together, overlaps once; None if one of them is not known."""
    if not all(start and end for start, end in spans):
        return None
    total, reached = 0.0, datetime.min.replace(tzinfo=UTC)
    for start, end in sorted((datetime.fromisoformat(start), datetime.fromisoformat(end)) for start, end in spans):
        total += max((end - max(start, reached)).total_seconds(), 0.0)
        reached = max(reached, end)
    return total


def _is_outdated(run: RunFolder, manifest: Manifest) -> bool:
    """True if an input of this manifest is there, and is no longer the one it was made from."""
    folders = {"merged": run.merged, "hidden": run.hidden, "train": run.draft, "export": run.export}
    folders["prompts"] = run.prompts(manifest.name)
    for name, digest in manifest.inputs.items():
        folder = run.root / name if name.startswith("responses/") else folders.get(name)
        try:
            if folder is not None and load_manifest(folder).digest() != digest:
                return True
        except ArtifactError:
            continue
    return False


def _is_worked_on(work: dict[str, Any]) -> bool:
    """True if a living process has begun this phase (which may not have reported yet)."""
    if "pid" not in work:
        return False
    return work.get("host", "") not in ("", socket.gethostname()) or is_alive(int(work["pid"]))


def _sum_counts(counts: list[Counts]) -> dict[str, int]:
    if not counts:
        return {}
    return {
        "in": sum(item.num_in for item in counts),
        "done": sum(item.done for item in counts),
        "rejected": sum(item.rejected for item in counts),
        "pending": sum(item.pending for item in counts),
    }


def _moving_counts(manifests: list[Manifest], pieces: list[ProgressMessage]) -> dict[str, int]:
    """Counts of a phase that is not finished: manifests of finished pieces, progress of the others."""
    redone = {piece.name for piece in pieces if not piece.is_final and piece.has_live_process}
    finished = {manifest.name: manifest.counts for manifest in manifests if manifest.name and manifest.name not in redone}
    moving = [piece for piece in pieces if not piece.name or piece.name not in finished]
    total = _sum_counts(list(finished.values())) or dict.fromkeys(("in", "done", "rejected", "pending"), 0)
    for piece in moving:
        if piece.unit not in _RECORD_UNITS:  # tokens, steps, shards: shown as progress, never counted as records
            continue
        rejected = piece.figures.get("rejected", 0)
        num_rejected = int(rejected) if not isinstance(rejected, str) else 0
        total["in"] += piece.total
        total["rejected"] += num_rejected
        total["done"] += max(0, piece.done - num_rejected)  # a phase reports how many it is through with
        total["pending"] += max(0, piece.total - max(piece.done, num_rejected))
    return total if total["in"] else {}


def _dataset_status(run: RunFolder, name: str, messages: list[ProgressMessage]) -> DatasetStatus:
    prompts, responses = _counts_of(run.prompts(name)), _counts_of(run.responses(name))
    moving = next((item for item in messages if item.name == name and phase_of_stage(item.stage) == "generate"), None)
    figures: dict[str, Any] = dict(_optional_json(run.responses(name) / "manifest.json").get("figures", {}))
    if moving is not None:
        figures |= moving.figures
        if not responses or responses["pending"]:
            responses = _moving_counts([], [moving])
    return DatasetStatus(dataset=name, prompts=prompts, responses=responses, figures=figures)


def _counts_of(folder: Path) -> dict[str, int]:
    counts: dict[str, int] = _optional_json(folder / "manifest.json").get("counts", {})
    return counts


def _run_state(phases: list[PhaseStatus]) -> Literal["new", "running", "stopped", "failed", "done"]:
    states = {phase.state for phase in phases}
    if states & {"running", "stalled"}:
        return "running"
    if states == {"done"}:
        return "done"
    if states & {"failed", "damaged"}:
        return "failed"
    return "new" if states == {"waiting"} else "stopped"


def _alarms(run: RunFolder, phases: list[PhaseStatus], disk: dict[str, int], forecast: dict[str, Any]) -> list[str]:
    alarms = [f"{phase.phase} is stalled: no progress recorded lately" for phase in phases if phase.state == "stalled"]
    alarms += [f"{phase.phase}: {phase.message}" for phase in phases if phase.state in ("failed", "damaged")]
    if _is_generating(phases):
        alarms += _open_events(run.progress / "events.jsonl")
    wanted = int(forecast.get("disk_bytes_to_write", 0))
    if wanted > disk["free_bytes"]:
        alarms.append(f"disk: {disk['free_bytes']:,} bytes free, {wanted:,} still to be written")
    return alarms


def _open_events(path: Path) -> list[str]:
    """What generation's watch has said began and not yet said ended."""
    going_on: dict[tuple[str, str], str] = {}
    for _, line in read_json_lines(path) if path.is_file() else []:
        try:
            event = json.loads(line)
            key, text = (event["kind"], event["name"]), f"{event['kind']} {event['name']}: {event['message']}"
            is_over = event["is_over"]
        except (ValueError, KeyError, TypeError):  # a torn line
            continue
        if is_over:
            going_on.pop(key, None)
        else:
            going_on[key] = text
    return list(going_on.values())


def _is_generating(phases: list[PhaseStatus]) -> bool:
    return any(phase.phase == "generate" and phase.state in ("running", "stalled") for phase in phases)


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except ArtifactError:
        return {}
    return value if isinstance(value, dict) else {}
