"""Phase 6 alone, on the export of a run that exists; scheduled nightly against a live server."""

from __future__ import annotations

from prefect import flow

from flows.phases import benchmark_phase, finished_phase
from flows.runs import BlockNames, config_of, running
from flows.turn import turn


@flow(name="benchmark", flow_run_name="benchmark {run}")
async def benchmark(
    run: str,
    settings: list[str] = [],
    server_block: str = "",
    host_block: str = "",
    storage_block: str = "",
) -> str:
    """Serve the draft of a run and measure accept length, equality of outputs and speed-up.

    Args:
        run: Folder of a run that the pipeline flow has started; its recorded config is used.
        settings: Changes of that config, one key=value each, for instance benchmark.prompts_per_set=40.
        server_block: Name of an SGLang Server block; replaces the server section. Empty uses the section.
        host_block: Name of a Target Host block; replaces operate.host. Empty uses the section.
        storage_block: Name of a Run Storage block for task results and final artifacts. Empty keeps them in the run folder.
    """
    async with (
        running(run, config_of(run, settings), BlockNames(server=server_block, host=host_block, storage=storage_block)) as job,
        turn(job.config),
    ):
        await benchmark_phase(job, finished_phase(job.run.export))
    return str(job.run.root)
