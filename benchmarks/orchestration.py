"""What Prefect costs a run: time beyond the library's own, task runs, rows and bytes of its database.

    python benchmarks/orchestration.py --run DIR          DIR is a finished run, for instance of the quick preset

All phases of the finished run are gone through three times as the flow does it (kept results removed, so every body
runs and verifies its manifest) and three times as the plain library does it (report included); the difference of the medians is
what orchestration adds once the server is up. To it comes the publishing of progress, 40 times in ten minutes, as in
the busiest phase (every dataset's generation has moved, and with it the plan and the table of datasets), and of the
tables of long series, ten times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOGGING_LEVEL, temporary_settings

from eyas.config import RunConfig
from eyas.operate.pipeline import run_pipeline
from eyas.operate.report import write_report
from eyas.workspace import RunFolder
from flows.pipeline import pipeline
from flows.runs import RESULTS_NAME, config_of
from flows.server import local_server
from tasks.publish import PUBLISH_S, TABLES_S, artifact_key

RUN_S = 600.0
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
            with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: home, PREFECT_LOGGING_LEVEL: "WARNING"}):
                measured = asyncio.run(flows(options.run, config, home))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    added_s = statistics.median(measured["flow_s"]) - statistics.median(library_s)
    publish_s, tables_s = measured.pop("publish_s")
    overhead = (added_s + publish_s * RUN_S / PUBLISH_S + tables_s * RUN_S / TABLES_S) / RUN_S
    print(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
                "server_start_s": round(start_s, 1),
                "library_s": [round(seconds, 2) for seconds in library_s],
                "flow_s": [round(seconds, 2) for seconds in measured.pop("flow_s")],
                "added_s": round(added_s, 2),
                "publish_s": round(publish_s, 3),
                "tables_s": round(tables_s, 3),
                "overhead_of_ten_minutes": f"{overhead:.2%}",
                "target": "2 %",
                "records": sum(1 for path in options.run.glob("responses/*/tokenized_data.jsonl") for _ in path.open("rb")),
                **measured,
            },
            indent=2,
        )
    )


def library(run: RunFolder, config: RunConfig) -> None:
    """What the flow does, without Prefect: all phases, then the report."""
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
    return {
        "flow_s": seconds,
        "publish_s": await publishing(run),
        "task_runs": counts[-1],
        "database_bytes_per_run": (sizes[-1] - sizes[0]) // REPEATS,
    }


async def count_task_runs(flow_run_id: Any) -> int:
    async with get_client() as client:
        return len(await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))))


async def publishing(run: Path) -> tuple[float, float]:
    """Seconds of one round of publishing while replies are generated, and of one of all tables: medians of nine."""
    from prefect import flow

    from tasks.publish import Publisher

    folder = RunFolder(run)

    @flow(name="publishing")
    async def rounds(is_last: bool) -> list[float]:
        times = []
        for number in range(10):
            publisher.seen = {key: at for key, at in publisher.seen.items() if not key.startswith(generated)}
            publisher.shown.clear()
            publisher.made_from.clear()
            started = time.monotonic()
            await publisher.publish(is_last=is_last)
            if number:  # the first makes the artifacts
                times.append(time.monotonic() - started)
        return times

    generated = artifact_key(run.name, "generate")
    publisher = Publisher(
        folder, lambda: folder.plan_md.read_text(encoding="utf-8"), lambda progress: None, since=datetime.fromtimestamp(0, UTC)
    )
    with_tables = statistics.median(await rounds(True))
    without = statistics.median(await rounds(False))
    return without, with_tables - without


def timed(work: Any) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def database_bytes(home: Path) -> int:
    """SQLite's file and its write-ahead log."""
    return sum(path.stat().st_size for path in home.glob("prefect.db*"))


if __name__ == "__main__":
    main()
