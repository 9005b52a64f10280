"""Phase 6 as a task: the draft served, measured, and compared with the target alone."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger
from pydantic import SecretStr

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key


@task(**OPTIONS, name="benchmark", task_run_name="benchmark", cache_key_fn=cache_key("benchmark"))
def benchmark_draft(run: Path, config: RunConfig, inputs: dict[str, str], api_key: SecretStr) -> Manifest:
    """Serve the exported draft and measure accept length, equality of outputs and speed-up."""
    from eyas.operate.hosts import host_of, sides_of
    from eyas.speculate.benchmark import benchmark

    folder, key = RunFolder(run), api_key.get_secret_value()
    serve = sides_of(host_of(folder, config, api_key=key, say=get_run_logger().info), folder.export)
    return benchmark(folder, config, report=recorder(folder.progress), api_key=key, serve=serve)


@task(name="baseline", task_run_name="baseline")
def benchmark_draft_to_beat(run: Path, config: RunConfig, api_key: SecretStr) -> Manifest | None:
    """Serve the draft that others trained and measure it; what is measured already is kept in its folder."""
    from eyas.operate.baseline import benchmark_baseline

    return benchmark_baseline(RunFolder(run), config, api_key=api_key.get_secret_value(), say=get_run_logger().info)
