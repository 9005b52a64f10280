"""Phase 1 as tasks: candidates per dataset, then one selection across all of them."""

from __future__ import annotations

from pathlib import Path

from prefect import task

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key


@task(**OPTIONS, name="candidates", task_run_name="candidates {dataset}")
def prepare_candidates(run: Path, config: RunConfig, dataset: str) -> Path:
    """Read, convert and clean one dataset. Not cached: a source file may change under the same name; the body finds out."""
    from eyas.prompts.prepare import prepare_candidates as library

    return library(RunFolder(run), config, dataset, report=recorder(RunFolder(run).progress))


@task(**OPTIONS, name="select prompts", task_run_name="select prompts", cache_key_fn=cache_key("select"))
def select_prompts(run: Path, config: RunConfig, inputs: dict[str, str]) -> dict[str, Manifest]:
    """Deduplicate, decontaminate, split and render across all datasets; one manifest per dataset."""
    from eyas.prompts.prepare import select_prompts as library

    return library(RunFolder(run), config, report=recorder(RunFolder(run).progress))
