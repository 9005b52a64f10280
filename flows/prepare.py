"""Phase 1 alone, for a run that exists."""

from __future__ import annotations

from prefect import flow

from flows.phases import prepare_phase
from flows.runs import config_of, running


@flow(name="prepare", flow_run_name="prepare {run}")
async def prepare(run: str, settings: list[str] = []) -> str:
    """Prepare the prompts of a run again; what has not changed is kept.

    Args:
        run: Folder of a run that the pipeline flow has started; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance prompts.heldout_share=0.1.
    """
    async with running(run, config_of(run, settings)) as job:
        await prepare_phase(job)
    return str(job.run.root)
