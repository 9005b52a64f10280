"""The deployments: one per preset for the whole pipeline and per phase, the watch, nightly benchmark, change of service.

Everything that needs the target's processors goes through the work queue `target-host`, one run at a time;
the rest does not wait behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from eyas.config import RunConfig, load_config
from flows.benchmark import benchmark
from flows.deploy import deploy
from flows.extract import extract
from flows.generate import generate
from flows.merge import merge
from flows.pipeline import pipeline
from flows.prepare import prepare
from flows.train import train
from flows.watch import watch

PRESETS = Path(__file__).parent / "presets"
POOL = "eyas"
HOST_QUEUE = "target-host"
LIGHT_QUEUE = "light"
TAG = "eyas"

Schedule = CronSchedule | IntervalSchedule


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One deployment: `name` below its flow, default parameters, queue, schedule (`is_active` False registers it switched off)."""

    flow: Flow[..., Any]
    name: str
    description: str
    queue: str
    parameters: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    is_active: bool = False


def catalogue() -> Iterator[Entry]:
    """All deployments, presets first."""
    for path in sorted(PRESETS.glob("*.yaml")):
        yield preset(path)
    phases: list[tuple[Flow[..., Any], str]] = [
        (prepare, LIGHT_QUEUE),
        (generate, HOST_QUEUE),
        (merge, LIGHT_QUEUE),
        (extract, HOST_QUEUE),
        (train, HOST_QUEUE),
        (benchmark, HOST_QUEUE),
    ]
    for number, (flow, queue) in enumerate(phases, start=1):
        line = (flow.description or "").partition("\n")[0]
        yield Entry(flow=flow, name=f"{number}-{flow.name}-only", description=line, queue=queue)
    yield Entry(
        flow=benchmark,
        name="benchmark-nightly",
        description="Measure a draft against a live server every night. Set run and server_block, then switch the schedule on.",
        queue=HOST_QUEUE,
        parameters={"run": "runs/production"},
        schedule=CronSchedule(cron="0 3 * * *", timezone="UTC"),
    )
    yield Entry(
        flow=deploy,
        name="deploy",
        description="Put the draft of a benchmarked run into service, with a canary and a way back. Runs on demand.",
        queue=HOST_QUEUE,
    )
    yield Entry(
        flow=watch,
        name="watch-every-5-minutes",
        description="Look at every run under the runs folder: stalls, gates, disk, servers.",
        queue=LIGHT_QUEUE,
        schedule=IntervalSchedule(interval=timedelta(minutes=5)),
        is_active=True,
    )


def preset(path: Path) -> Entry:
    """The pipeline with a preset's sections as defaults of its form; what is written above its first key describes it."""
    config = load_config(path)
    lines = path.read_text(encoding="utf-8").split("\n")
    above = [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    sections = {
        name: getattr(config, name).model_dump(mode="json", exclude_unset=False)
        for name in RunConfig.model_fields
        if name != "name"
    }
    return Entry(
        flow=pipeline,
        name=path.stem,
        description="\n".join(above),
        queue=HOST_QUEUE,
        parameters={"run": f"runs/{path.stem}", **sections},
    )
