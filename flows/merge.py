"""Phase 3 alone, on the responses of a run that exists."""

from __future__ import annotations

from prefect import flow

from flows.phases import finished_datasets, merge_phase
from flows.runs import config_of, running


@flow(name="merge", flow_run_name="merge {run}")
async def merge(run: str, settings: list[str] = []) -> str:
    """Merge and shuffle the responses of a run, and make its vocabulary map.

    Args:
        run: Folder of a run that the pipeline flow has started; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance merging.draft_vocab_size=16384.
    """
    async with running(run, config_of(run, settings)) as job:
        await merge_phase(job, finished_datasets(job, job.run.responses))
    return str(job.run.root)
