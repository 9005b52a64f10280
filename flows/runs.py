"""What surrounds the phases of every flow: the run folder held, its config written, its progress shown, its report made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import acreate_markdown_artifact

from blocks import RunStorage, SGLangServer, TargetHost
from blocks.loading import load_block
from eyas.config import RunConfig, apply_override, parse_config
from eyas.errors import ConfigError, GateError
from eyas.files import read_json
from eyas.operate.keys import server_api_key
from eyas.operate.pipeline import open_run
from eyas.operate.plan import PlanKeeper
from eyas.operate.preflight import preflight
from eyas.operate.status import read_status
from eyas.workspace import RunFolder, exclusive
from flows.decide import recorded_settings
from flows.phases import Job, with_settings
from tasks.events import emit
from tasks.publish import artifact_key, published
from tasks.spread import spread_over

RESULTS_NAME = ".prefect"


@dataclass(frozen=True, kw_only=True)
class BlockNames:
    """Names of the blocks that a flow was given; "" stands for none."""

    server: str = ""
    host: str = ""
    storage: str = ""


@asynccontextmanager
async def running(run: str, config: RunConfig, blocks: BlockNames = BlockNames(), *, has_phases: bool = True) -> AsyncIterator[Job]:
    """One flow's hold on a run: nobody else writes it, its progress and plan are kept current, its report is made at the end.

    A flow that has phases to run refuses first what any of them would refuse later, as the CLI does: raises `ConfigError`.
    """
    root = Path(run)
    config = config.model_copy(update={"name": root.name})
    api_key = server_api_key(config, os.environ.get("EYAS_API_KEY", ""))  # a block's own key replaces it
    if blocks.server:
        server = await load_block(SGLangServer, blocks.server)
        config, api_key = server.applied(config), server.api_key.get_secret_value()
    if blocks.host:
        config = (await load_block(TargetHost, blocks.host)).applied(config)
    storage = await load_block(RunStorage, blocks.storage) if blocks.storage else None
    results = f"{RunStorage.get_block_type_slug()}/{blocks.storage}" if storage else (root / RESULTS_NAME).resolve()
    folder = RunFolder(root).create()
    with exclusive(root / ".lock", f"run folder {root}"):
        config = with_settings(config, recorded_settings(folder))
        if has_phases:
            await asyncio.to_thread(preflight, root, config, api_key=api_key)
        await asyncio.to_thread(open_run, root, config)
        keeper = PlanKeeper(folder, config)
        async with spread_over(config.operate.runner) as spread:
            job = Job(run=folder, config=config, keeper=keeper, results=results, spread=spread, api_key=api_key)
            async with published(folder, lambda: _plan(folder), lambda progress: job.keeper.on_progress(progress)):
                try:
                    yield job
                except GateError as error:
                    emit("gate breached", root, str(error))
                    raise
        from eyas.operate.report import write_report  # with its plots it costs a second

        markdown, html = await asyncio.to_thread(write_report, folder)
        text = markdown.read_text(encoding="utf-8")
        await acreate_markdown_artifact(text, key=artifact_key(root.name, "report"), description=_headline(folder))
        if storage is not None:
            await storage.keep({f"{root.name}/{path.relative_to(root)}": path for path in _final_files(folder, markdown, html)})


def _final_files(folder: RunFolder, *reports: Path) -> list[Path]:
    export = sorted(path for path in folder.export.glob("*") if path.is_file()) if folder.export.is_dir() else []
    return [folder.run_json, *export, *reports]


def config_of(run: str, settings: list[str]) -> RunConfig:
    """The config that an existing run recorded, with `key=value` settings applied; raises `ConfigError`, `ArtifactError`."""
    raw = read_json(RunFolder(Path(run)).run_json)
    if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
        raise ConfigError(f"{run}/run.json holds no config; start the run with the pipeline flow")
    for setting in settings:
        apply_override(raw["config"], setting)
    return parse_config(raw["config"], where=f"{run}/run.json")


def _plan(folder: RunFolder) -> str:
    return folder.plan_md.read_text(encoding="utf-8") if folder.plan_md.is_file() else ""


def _headline(folder: RunFolder) -> str:
    """What the report says, in one line: the list of artifacts shows nothing else."""
    status = read_status(folder.root)
    if not status.results:
        return f"{status.name}: {status.state}"
    length = status.results["accept_length"]["overall"]
    outputs = status.results["outputs"]
    return f"accept length {length:.2f}, {outputs['identical']} of {outputs['checked']} replies identical, {outputs['wrong']} wrong"
