"""Bring a Prefect server in line with the code: block types, work pool, queues, deployments, automations.

Everything goes by name, so running it again changes what differs and doubles nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from blocks import Alert, RunStorage, SGLangServer, TargetHost
from deployments.automations import register_automations
from deployments.catalogue import HOST_QUEUE, LIGHT_QUEUE, POOL, TAG, Entry, catalogue

BLOCKS = (SGLangServer, TargetHost, RunStorage, Alert)


async def register(runs_home: Path) -> list[str]:
    """Register everything; gives the deployments' full names. On the worker, relative run folders lie below `runs_home`."""
    async with get_client() as client:
        for block in BLOCKS:
            await block.aregister_type_and_schema(client=client)
        await _work_pool(client)
        names = [await deploy(entry, runs_home) for entry in catalogue()]
        await register_automations(client)
    return names


async def deploy(entry: Entry, runs_home: Path) -> str:
    """Create or update one deployment; gives its full name."""
    schedules: list[Any] = []
    if entry.schedule is not None:
        schedules = [DeploymentScheduleCreate(schedule=entry.schedule, active=entry.is_active, slug=entry.name)]
    deployment = await entry.flow.ato_deployment(
        entry.name,
        parameters=entry.parameters,
        schedules=schedules or None,
        description=entry.description,
        tags=[TAG],
        work_pool_name=POOL,
        work_queue_name=entry.queue,
        job_variables={"working_dir": str(runs_home)},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    await deployment.aapply()
    return str(deployment.full_name)


async def _work_pool(client: PrefectClient) -> None:
    template = ProcessWorker.get_default_base_job_template()
    try:
        await client.read_work_pool(POOL)
        await client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    except ObjectNotFound:
        description = "Runs of Eyas, as processes of a worker on this machine."
        await client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=template, description=description)
        )
    for name, limit in ((HOST_QUEUE, 1), (LIGHT_QUEUE, None)):
        try:
            queue = await client.read_work_queue_by_name(name, work_pool_name=POOL)
        except ObjectNotFound:
            queue = await client.create_work_queue(name, work_pool_name=POOL)
        await client.update_work_queue(queue.id, concurrency_limit=limit)
