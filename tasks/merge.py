"""Phase 3 as a task."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key


@task(**OPTIONS, name="merge", task_run_name="merge", cache_key_fn=cache_key("merge"))
def merge_responses(run: Path, config: RunConfig, inputs: dict[str, str]) -> Manifest:
    """Order, cut and pack all responses, and make the vocabulary map."""
    from eyas.merging.merge import merge

    return merge(RunFolder(run), config, report=recorder(RunFolder(run).progress))
