"""The draft of a benchmarked run into service, or the target alone again and the reason."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.artifacts import acreate_table_artifact
from prefect.states import Failed
from pydantic import SecretStr

from flows.phases import finished_phase
from flows.runs import BlockNames, config_of, running
from flows.turn import turn
from tasks.caching import run_task
from tasks.deploy import serve_draft
from tasks.publish import artifact_key


@flow(name="deploy", flow_run_name="deploy {run}")
async def deploy(
    run: str,
    settings: list[str] = [],
    server_block: str = "",
    host_block: str = "",
    storage_block: str = "",
) -> Any:
    """Serve the draft of a benchmarked run, prove it by canary replies, and go back to the target alone if anything fails.

    Args:
        run: Folder of a run whose benchmark is finished; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance benchmark.accept_floor=1.5.
        server_block: Name of an SGLang Server block; replaces the server section. Empty uses the section.
        host_block: Name of a Target Host block; replaces operate.host. Empty uses the section.
        storage_block: Name of a Run Storage block for final artifacts. Empty keeps them in the run folder.
    """
    blocks = BlockNames(server=server_block, host=host_block, storage=storage_block)
    async with running(run, config_of(run, settings), blocks, has_phases=False) as job:
        finished_phase(job.run.benchmark)
        async with turn(job.config):
            deployment = await run_task(serve_draft, api_key=SecretStr(job.api_key), **job.shared)
        rows = [check.model_dump() for check in deployment.checks]
        said = f"{deployment.outcome}: {deployment.reason}"
        await acreate_table_artifact(rows, key=artifact_key(job.run.root.name, "deployment"), description=said)
    return str(job.run.root) if deployment.serves_draft else Failed(message=said)
