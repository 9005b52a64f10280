"""The plan of a run, kept current all through it: phases, counts, forecast, alternatives, decisions.

`plan.json` is for programs, `plan.md` for people; both are written whole at every change and every 30 s
while a phase works. The state of a phase comes from its manifests; what only the plan knows (`work`: who
works on it now or why it failed; who decided what) lives here and survives the process.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from eyas.config import RunConfig
from eyas.errors import ConfigError, EyasError
from eyas.files import read_json, write_bytes, write_json
from eyas.hidden.codec import bytes_per_token
from eyas.manifest import now
from eyas.operate.alternatives import alternatives
from eyas.operate.baseline import baseline_said
from eyas.operate.codec_result import read_codecs, render_codecs
from eyas.operate.curve_result import advice, read_curve
from eyas.operate.forecast import Forecast, PhaseForecast, TargetSizes, forecast, sizes_of
from eyas.operate.phases import TITLES, Phase
from eyas.operate.status import PhaseStatus, RunStatus, read_status, work_of
from eyas.operate.volumes import Volumes, volumes
from eyas.operate.wording import duration, size
from eyas.progress import Progress
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)

REFRESH_S = 30.0


class PlanKeeper:
    """Writes the plan of one run; any process that works on the run holds one."""

    def __init__(self, run: RunFolder, config: RunConfig, *, every_s: float = REFRESH_S) -> None:
        self._run = run
        self._config = config
        self._every_s = every_s
        spec = load_target(config.target)
        self._sizes, self._target = sizes_of(spec), spec.fingerprint
        self._lock = threading.RLock()
        self._written_s = 0.0
        previous = _previous(run)
        self._work: dict[str, dict[str, Any]] = work_of(previous)
        self._decisions: list[dict[str, str]] = previous.get("decisions", [])
        self._is_asking = False

    def start(self, phase: Phase) -> None:
        """This process begins a phase; what an earlier attempt said about it is forgotten."""
        self._set(phase, {"started_at": now(), "pid": os.getpid(), "host": socket.gethostname()})

    def finish(self, phase: Phase) -> None:
        """The phase ended well."""
        self._set(phase, {})

    def fail(self, phase: Phase, message: str) -> None:
        """The phase ended with an error, in one line."""
        self._set(phase, {"message": " ".join(message.split()), "finished_at": now()})

    def ask(self) -> dict[str, Any]:
        """The plan that is to be decided on; until then it says that it waits."""
        self._is_asking = True
        return self.refresh()

    def decide(self, what: str, *, who: str, why: str) -> None:
        """Record a decision."""
        with self._lock:
            self._is_asking = False
            self._decisions.append({"at": now(), "who": who, "what": what, "why": why})
        self.refresh()

    @property
    def is_accepted(self) -> bool:
        """True if the last decision was to go on."""
        return bool(self._decisions) and self._decisions[-1]["what"] == "accept"

    def on_progress(self, progress: Progress) -> None:
        """A progress listener that refreshes the plan every `every_s` seconds; a disk that refuses is only logged."""
        if time.monotonic() - self._written_s < self._every_s:
            return
        try:
            self.refresh()
        except (EyasError, OSError) as error:
            logger.warning("plan not written run=%s error=%s", self._run.root, error)

    def refresh(self) -> dict[str, Any]:
        """Write plan.json and plan.md from the run folder as it is now; returns the plan."""
        with self._lock:
            self._written_s = time.monotonic()
            status = read_status(self._run.root, work=self._work)
            counted, codecs = volumes(self._run, self._config), read_codecs(self._run, self._target)
            plan = make_plan(status, self._config, self._sizes, counted, read_curve(self._run), codecs)
            for item in plan["phases"]:
                item["work"] = self._work.get(item["phase"], {})
            if self._is_asking:
                plan["state"] = "waiting for a decision"
            plan["baseline"] = baseline_said(self._run)
            plan["decisions"] = self._decisions
            write_json(self._run.plan_json, plan)
            write_bytes(self._run.plan_md, render_plan(plan).encode())
            return plan

    def _set(self, phase: Phase, work: dict[str, Any]) -> None:
        with self._lock:
            self._work[phase] = work
        self.refresh()


def make_plan(
    status: RunStatus,
    config: RunConfig,
    sizes: TargetSizes,
    counted: Volumes,
    curve: Mapping[str, Any] | None = None,
    codecs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The plan as plain data; `priority` 1 is what is worked on or comes next.

    `curve` is the learning curve, `codecs` the codec probe, once there is one.
    """
    statuses = {phase.phase: phase for phase in status.phases}
    outlook = forecast(config, sizes, counted, statuses)
    unfinished = [phase.phase for phase in status.phases if phase.state != "done"]
    return {
        "run": status.run,
        "name": status.name,
        "at": status.at,
        "state": status.state,
        "phases": [
            _phase_row(statuses[item.phase], item, unfinished.index(item.phase) + 1 if item.phase in unfinished else 0)
            for item in outlook.phases
        ],
        "forecast": outlook.model_dump(exclude={"phases"}) | {"disk_free_bytes": status.disk["free_bytes"]},
        "alternatives": []
        if statuses["generate"].state == "done"
        else alternatives(config, sizes, counted, statuses, curve, codecs),
        "learning_curve": advice(curve) if curve else None,
        "codecs": codecs if statuses["extract"].state != "done" else None,
    }


def check_disk(outlook: Forecast, config: RunConfig, folder_free_bytes: int, where: str) -> None:
    """Refuse, with the numbers, what the disk cannot hold; raises `ConfigError`."""
    reserve = config.hidden.disk_reserve_bytes
    if outlook.disk_bytes_to_write + reserve <= folder_free_bytes:
        return
    largest = max(outlook.phases, key=lambda item: item.disk_bytes)
    raise ConfigError(
        f"disk of {where} has {size(folder_free_bytes)} free; the run still writes about {size(outlook.disk_bytes_to_write)} "
        f"({size(largest.disk_bytes)} in phase {largest.phase}) and keeps {size(reserve)} free (hidden.disk_reserve_bytes); "
        "free space, choose another --run or a smaller hidden.codec, keep only a window of states (hidden.disk_budget), or lower "
        "prompts.subsample or the quotas (each source is taken to fill its quota until phase 1 has counted its rows)"
    )


def check_budget(outlook: Forecast, config: RunConfig, hidden_size: int) -> None:
    """Refuse, with the numbers, a `hidden.disk_budget` that held-out states alone would fill; raises `ConfigError`.

    A shard is a sixteenth of the budget, and two must fit beside them; the extraction checks this again with counted records.
    """
    budget = config.hidden.disk_budget
    item = next(item for item in outlook.phases if item.phase == "extract")
    heldout_bytes = item.tokens * bytes_per_token(hidden_size, config.hidden.codec)
    if budget and heldout_bytes + budget // 8 > budget:
        raise ConfigError(
            f"hidden.disk_budget is {size(budget)}; held-out states, which every replay reads, take about {size(heldout_bytes)} "
            f"({item.tokens:,} tokens) and leave no room for two shards of {size(budget // 16)}; raise it to at least "
            f"{size(round(heldout_bytes * 8 / 7) + 1)}, choose a smaller hidden.codec, or lower prompts.heldout_share"
        )


def free_bytes(folder: os.PathLike[str] | str) -> int:
    """Bytes free on the disk that holds `folder`, or would hold it."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as Markdown."""
    outlook = plan["forecast"]
    hours = "time unknown" if outlook["hours"] is None else f"{duration(outlook['hours'] * 3600)} left"
    is_done = not any(row["priority"] for row in plan["phases"])
    lines = [
        f"# Plan of {plan['name']}: {plan['state']}" + ("" if is_done else f", {hours}"),
        "",
        f"{plan['at']}. Still to be written: {'nothing' if is_done else _written(outlook)}, "
        f"free: {size(outlook['disk_free_bytes'])}. Tokens: {outlook['volumes_basis'] or 'no dataset'}.",
        "",
        "| priority | phase | state | in | done | rejected | pending | left | disk left | rests on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in plan["phases"]:
        counts = [f"{row['counts'][key]:,}" if row["counts"] else "" for key in ("in", "done", "rejected", "pending")]
        left = row["forecast"]["hours"]
        disk = size(row["forecast"]["disk_bytes"]) if row["forecast"]["disk_bytes"] else ""
        cells = [
            str(row["priority"]) if row["priority"] else "",
            row["title"],
            row["state"],
            *counts,
            "?" if left is None else duration(left * 3600) if left else "",
            disk if row["forecast"]["is_known"] else "?",
            row["forecast"]["basis"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n**{row['title']}**: {row['message']}" for row in plan["phases"] if row.get("message")]
    if plan["alternatives"]:
        lines += [
            "",
            "## Alternatives",
            "",
            "| what | set | prompts | reply tokens | time | GPU-hours | disk | accept length (80 %) | lost against all |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in plan["alternatives"]:
            cells = [
                row["name"],
                f"`{row['set']}`" if row["set"] else "",
                "unknown" if row["prompts"] is None else f"{row['prompts']:,}",
                "unknown" if row["tokens"] is None else f"{row['tokens']:,}",
                "unknown" if row["hours"] is None else duration(row["hours"] * 3600),
                "" if row["gpu_hours"] is None else f"{row['gpu_hours']:,.1f}",
                "unknown" if row["disk_bytes"] is None else size(row["disk_bytes"]),
                "" if row["accept_length"] is None else "{:.2f} ({:.2f}–{:.2f})".format(*row["accept_length"]),
                f"{row['accept_length_lost']:.2f}" if row["accept_length_lost"] else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if plan["learning_curve"]:
        lines += ["", "## Learning curve", "", f"{plan['learning_curve'][0].upper()}{plan['learning_curve'][1:]}."]
    if plan["codecs"]:
        lines += ["", "## Smaller hidden states", "", render_codecs(plan["codecs"])]
    if plan.get("baseline"):
        lines += ["", "## Baseline", "", plan["baseline"]]
    if plan["decisions"]:
        lines += ["", "## Decisions", ""]
        lines += [f"- {item['at']} {item['who']}: **{item['what']}** ({item['why']})" for item in plan["decisions"]]
    return "\n".join(lines) + "\n"


def _written(outlook: dict[str, Any]) -> str:
    if not outlook["is_known"]:
        return f"unknown, at least {size(outlook['disk_bytes_to_write'])}"
    return f"{size(outlook['disk_bytes_to_write'])} (at most {size(outlook['disk_bytes_at_most'])})"


def _phase_row(status: PhaseStatus, item: PhaseForecast, priority: int) -> dict[str, Any]:
    return {
        "phase": status.phase,
        "title": TITLES[status.phase],
        "priority": priority,
        "state": status.state,
        "counts": status.counts,
        "rejected_by_reason": status.rejected_by_reason,
        "started_at": status.started_at,
        "finished_at": status.finished_at,
        "message": status.message,
        "forecast": item.model_dump(exclude={"phase"}),
    }


def _previous(run: RunFolder) -> dict[str, Any]:
    try:
        plan = read_json(run.plan_json)
    except EyasError:
        return {}
    return plan if isinstance(plan, dict) else {}
