"""What Prefect costs a run: time beyond the library's own, task runs, rows and bytes of its database.

    python benchmarks/orchestration.py --run DIR          DIR is a finished run, for instance of the default preset

Two things are measured on a server that is up. The fixed part: all phases of the finished run are gone through three times as
the flow does it (kept results removed, so every body runs and verifies its manifest) and three times as the plain library
does it (checks and report included); the difference of the medians. And publishing: the run's own recorded progress is played
back in steps of `PUBLISH_S`, so that at each step exactly those pieces are published that had moved in the real run. The sum is
given as a share of the time that the recorded run took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import sqlite3
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_LOGGING_LEVEL, temporary_settings

from eyas.config import RunConfig
from eyas.operate.messages import ProgressMessage, read_history
from eyas.operate.pipeline import run_pipeline
from eyas.operate.plan import REFRESH_S
from eyas.operate.preflight import preflight
from eyas.operate.report import write_report
from eyas.progress import HISTORY_NAME
from eyas.workspace import RunFolder
from flows.pipeline import pipeline
from flows.runs import RESULTS_NAME, config_of
from flows.server import local_server, used_here
from tasks.publish import PUBLISH_S, TABLES_S, Publisher

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished run")
    options = parser.parse_args()
    config = config_of(str(options.run), [])
    run_pipeline(RunFolder(options.run), config)  # whatever is not finished yet is finished first
    library_s = [timed(lambda: library(RunFolder(options.run), config)) for _ in range(REPEATS)]
    home = Path(tempfile.mkdtemp(prefix="eyas-orchestration-"))
    try:
        started = time.monotonic()
        with local_server(home=home) as url:
            start_s = time.monotonic() - started
            with used_here(url, home), temporary_settings({PREFECT_LOGGING_LEVEL: "WARNING"}):
                measured = asyncio.run(flows(options.run, config, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    added_s = statistics.median(measured["flow_s"]) - statistics.median(library_s)
    run_s, publish_s = measured["run_s"], measured["publish_s"]
    print(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
                "server_start_s": round(start_s, 1),
                "library_s": [round(seconds, 2) for seconds in library_s],
                "flow_s": [round(seconds, 2) for seconds in measured.pop("flow_s")],
                "added_s": round(added_s, 2),
                "overhead": f"{(added_s + publish_s) / run_s:.2%} of {run_s:.0f} s",
                "overhead_of_ten_minutes": f"{(added_s + publish_s * 600 / run_s) / 600:.2%}",
                "target": "2 %",
                "records": sum(1 for path in options.run.glob("responses/*/tokenized_data.jsonl") for _ in path.open("rb")),
                **measured,
            },
            indent=2,
        )
    )


def library(run: RunFolder, config: RunConfig) -> None:
    """What the flow does, without Prefect: the checks, all phases, then the report."""
    preflight(run.root, config)
    run_pipeline(run, config)
    write_report(run)


async def flows(run: Path, config: RunConfig, home: Path) -> dict[str, Any]:
    """Go through the finished run with the flow; times, task runs, growth of the database."""
    sections = {name: getattr(config, name) for name in RunConfig.model_fields if name != "name"}
    seconds, sizes, counts = [], [database_bytes(home)], []
    for _ in range(REPEATS):
        shutil.rmtree(run / RESULTS_NAME, ignore_errors=True)
        started = time.monotonic()
        state = await pipeline(run=str(run), **sections, return_state=True)  # type: ignore[call-overload]
        seconds.append(time.monotonic() - started)
        assert state.is_completed(), state
        await asyncio.sleep(3)  # events and task runs are written a moment after the fact
        sizes.append(database_bytes(home))
        counts.append(await count_task_runs(state.state_details.flow_run_id))
    before = database_bytes(home)
    played = await play_back(run, home / "played" / run.name)
    await asyncio.sleep(3)
    return {
        "flow_s": seconds,
        **played,
        "task_runs": counts[-1],
        "database_bytes_fixed": (sizes[-1] - sizes[0]) // REPEATS,
        "database_bytes_published": database_bytes(home) - before,
    }


async def count_task_runs(flow_run_id: Any) -> int:
    async with get_client() as client:
        return len(await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))))


async def play_back(recorded: Path, copy: Path) -> dict[str, Any]:
    """Publish what `recorded` recorded of its progress as it would have been published then; seconds, steps, lengths."""
    history = read_history(RunFolder(recorded).progress)
    times = [datetime.fromisoformat(message.at) for message in history]
    run_s = (times[-1] - times[0]).total_seconds()
    shutil.copytree(recorded, copy, copy_function=link, ignore=shutil.ignore_patterns("progress", RESULTS_NAME, "metrics.jsonl"))
    folder = RunFolder(copy)
    metrics = (recorded / "draft" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    plan = (recorded / "plan.md").read_text(encoding="utf-8")

    @flow(name="played back")
    async def publishes() -> list[float]:
        seconds, moved, refreshed = [], 0, ""
        async with get_client() as client:
            publisher = Publisher(folder, lambda: f"{plan}\n{refreshed}", lambda progress: None, client, since=times[0])
            for step in range(1, int(run_s / PUBLISH_S) + 2):
                moved = write_progress(folder, history, times, moved, step * PUBLISH_S, metrics)
                refreshed = f"refreshed {step * PUBLISH_S // REFRESH_S}"
                publisher.tables_at = -TABLES_S if step % round(TABLES_S / PUBLISH_S) == 0 else time.monotonic()
                started = time.monotonic()
                await publisher.publish(is_last=moved == len(history))
                seconds.append(time.monotonic() - started)
        return seconds

    seconds = await publishes()
    return {
        "run_s": round(run_s, 1),
        "publish_s": round(sum(seconds), 2),
        "publications": len(seconds),
        "publication_median_s": round(statistics.median(seconds), 3),
        "publication_longest_s": round(max(seconds), 3),
    }


def write_progress(
    run: RunFolder, history: list[ProgressMessage], times: list[datetime], moved: int, until_s: float, metrics: list[bytes]
) -> int:
    """Bring the folder's progress, and the trainer's metrics with it, to `until_s` of the recorded run; messages so far."""
    run.progress.mkdir(parents=True, exist_ok=True)
    while moved < len(history) and (times[moved] - times[0]).total_seconds() <= until_s:
        message = history[moved]
        name = f"{message.stage}-{message.name}" if message.name else message.stage
        (run.progress / f"{name}.json").write_text(message.model_dump_json(), encoding="utf-8")
        with (run.progress / HISTORY_NAME).open("a", encoding="utf-8") as file:
            file.write(message.model_dump_json() + "\n")
        if message.stage == "train" and message.total:
            (run.draft / "metrics.jsonl").write_bytes(b"".join(metrics[: len(metrics) * message.done // message.total]))
        moved += 1
    return moved


def link(source: str, target: str) -> None:
    """A second name for a file: nothing is copied."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def timed(work: Any) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def database_bytes(home: Path) -> int:
    """Bytes of SQLite's pages, those of its write-ahead log counted once."""
    with contextlib.closing(sqlite3.connect(home / "prefect.db")) as database:
        pages, page_bytes = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages * page_bytes)


if __name__ == "__main__":
    main()
