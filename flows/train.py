"""Phase 5 alone, on the hidden states of a run that exists."""

from __future__ import annotations

from prefect import flow

from flows.phases import finished_phase, train_phase
from flows.runs import config_of, running
from flows.turn import turn


@flow(name="train", flow_run_name="train {run}")
async def train(run: str, settings: list[str] = []) -> str:
    """Train the draft of a run, from its last checkpoint if the settings are unchanged, and export it.

    Args:
        run: Folder of a run that the pipeline flow has started; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance draft.learning_rate=0.0005.
    """
    async with running(run, config_of(run, settings)) as job, turn(job.config):
        await train_phase(job, finished_phase(job.run.merged), finished_phase(job.run.hidden, checks_digests=False))
    return str(job.run.root)
