"""The change of service as a task: tried once, nothing kept, its outcome told."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger
from pydantic import SecretStr

from blocks.alerts import AlertEvent
from eyas.config import RunConfig
from eyas.operate.deploy import Deployment, Outcome, deploy_run
from eyas.workspace import RunFolder
from tasks.events import emit

EVENTS: dict[Outcome, AlertEvent] = {
    "serving with the draft": "draft deployed",
    "rolled back: serving the target without draft": "draft rolled back",
    "nothing was switched": "draft refused",
}


@task(name="deploy", task_run_name="deploy")
def serve_draft(run: Path, config: RunConfig, api_key: SecretStr) -> Deployment:
    """Bring the host into serving with the draft, send the canary, and roll back where a check fails."""
    deployment = deploy_run(RunFolder(run), config, api_key=api_key.get_secret_value(), say=get_run_logger().info)
    emit(EVENTS[deployment.outcome], run, f"{deployment.outcome}: {deployment.reason}")
    return deployment
