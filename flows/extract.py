"""Phase 4 alone, on the responses of a run that exists."""

from __future__ import annotations

from prefect import flow

from flows.phases import extract_phase, finished_datasets, finished_phase
from flows.runs import BlockNames, config_of, running
from flows.turn import turn


@flow(name="extract", flow_run_name="extract {run}")
async def extract(run: str, settings: list[str] = [], server_block: str = "", host_block: str = "", storage_block: str = "") -> str:
    """Extract the hidden states that a run still lacks.

    Args:
        run: Folder of a run that the pipeline flow has started; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance hidden.batch_tokens=8192.
        server_block: Name of an SGLang Server block; replaces the server section. Empty uses the section.
        host_block: Name of a Target Host block; replaces operate.host. Empty uses the section.
        storage_block: Name of a Run Storage block for task results and final artifacts. Empty keeps them in the run folder.
    """
    async with (
        running(run, config_of(run, settings), BlockNames(server=server_block, host=host_block, storage=storage_block)) as job,
        turn(job.config),
    ):
        await extract_phase(job, finished_datasets(job, job.run.responses), finished_phase(job.run.merged))
    return str(job.run.root)
