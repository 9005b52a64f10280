"""Phase 6 as a task: the draft served, measured, and compared with the target alone."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from pydantic import SecretStr

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key


@task(**OPTIONS, name="benchmark", task_run_name="benchmark", cache_key_fn=cache_key("benchmark"))
def benchmark_draft(run: Path, config: RunConfig, inputs: dict[str, str], api_key: SecretStr) -> Manifest:
    """Serve the exported draft and measure accept length, equality of outputs and speed-up."""
    from eyas.speculate.benchmark import benchmark

    return benchmark(RunFolder(run), config, report=recorder(RunFolder(run).progress), api_key=api_key.get_secret_value())
