"""The whole job as one flow: prepare → generate → merge → extract → train → export → benchmark.

Everything that is finished in the run folder is kept, so the flow can be killed, retried, or started again
at any moment. The flow itself is never retried by Prefect: its tasks are.

    python -m flows.pipeline --config FILE --run DIR [--set KEY=VALUE] [--ui]     runs it here and now
"""

from __future__ import annotations

import sys

from prefect import flow

from eyas.config import RunConfig
from eyas.draft.config import DraftConfig
from eyas.generation.config import GenerationConfig
from eyas.hidden.config import HiddenConfig
from eyas.merging.config import MergingConfig
from eyas.operate.config import OperateConfig
from eyas.operate.phases import Phase
from eyas.prompts.config import PromptsConfig
from eyas.sglang.config import ServerConfig
from eyas.speculate.config import BenchmarkConfig
from eyas.target.config import TargetConfig
from flows.decide import decide
from flows.early import early_work
from flows.local import run_here
from flows.phases import (
    Job,
    Manifests,
    benchmark_draft_of_others,
    benchmark_phase,
    extract_phase,
    generate_phase,
    merge_phase,
    prepare_phase,
    train_phase,
)
from flows.runs import BlockNames, running
from flows.turn import turn


@flow(name="pipeline", flow_run_name="pipeline {run}")
async def pipeline(
    run: str = "runs/my-run",
    until: Phase = "bench",
    server_block: str = "",
    host_block: str = "",
    storage_block: str = "",
    target: TargetConfig = TargetConfig(),
    server: ServerConfig = ServerConfig(),
    prompts: PromptsConfig = PromptsConfig(),
    generation: GenerationConfig = GenerationConfig(),
    merging: MergingConfig = MergingConfig(),
    hidden: HiddenConfig = HiddenConfig(),
    draft: DraftConfig = DraftConfig(),
    benchmark: BenchmarkConfig = BenchmarkConfig(),
    operate: OperateConfig = OperateConfig(),
) -> str:
    """Train an EAGLE-3 draft for the target and measure its speed-up. Run it again with the same folder to continue.

    Args:
        run: Run folder, reachable by every worker; a relative one lies below the worker's folder. An existing one is continued.
        until: Last phase to run; the others can follow later, from the same folder.
        server_block: Name of an SGLang Server block; its URLs and key replace the server section. Empty uses the section.
        host_block: Name of a Target Host block; it replaces operate.host. Empty uses the section.
        storage_block: Name of a Run Storage block for task results and final artifacts. Empty keeps them in the run folder.
        target: The model that is served and for which the draft is trained.
        server: Where the target is served; Eyas' own engine for a small model on this machine.
        prompts: Phase 1. The datasets and what is kept of them.
        generation: Phase 2. Sampling and quality gates of the target's own responses.
        merging: Phase 3. Training order and draft vocabulary.
        hidden: Phase 4. Who computes hidden states, and how they are stored.
        draft: Phase 5. Shape and training of the draft.
        benchmark: Phase 6. What is measured with the draft served.
        operate: Decisions before the long phases, alarms, and the host of the target.
    """
    config = RunConfig(
        target=target,
        server=server,
        prompts=prompts,
        generation=generation,
        merging=merging,
        hidden=hidden,
        draft=draft,
        benchmark=benchmark,
        operate=operate,
    )
    async with running(run, config, BlockNames(server=server_block, host=host_block, storage=storage_block)) as job:
        await run_phases(job, until)
    return str(job.run.root)


async def run_phases(job: Job, until: Phase = "bench") -> None:
    """The phases in order, each gated by the manifests of those before it; stops after `until`."""
    prompts = await prepare_phase(job)
    if until == "prepare":
        return
    if job.config.draft.baseline:
        async with turn(job.config):
            await benchmark_draft_of_others(job)
    if await decide(job):
        prompts = await prepare_phase(job)
    async with turn(job.config):
        await _on_the_host(job, prompts, until)


async def _on_the_host(job: Job, prompts: Manifests, until: Phase) -> None:
    """The phases that use the target's servers or need their processors free."""
    if until == "generate":
        await generate_phase(job, prompts)
        return
    async with early_work(job) as on_dataset:
        responses = await generate_phase(job, prompts, on_dataset)
    merged = await merge_phase(job, responses)
    if until == "merge":
        return
    hidden = await extract_phase(job, responses, merged)
    if until == "extract":
        return
    exported = await train_phase(job, merged, hidden)
    if until == "train":
        return
    await benchmark_phase(job, exported)


if __name__ == "__main__":
    sys.exit(run_here(pipeline))
