"""Phase 5 as tasks: training in a child process of its own, then the export in the engines' format."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from prefect import task

from eyas.config import RunConfig
from eyas.manifest import Manifest, load_manifest
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key
from tasks.children import run_child


@task(**OPTIONS, name="train", task_run_name="train", cache_key_fn=cache_key("train"))
async def train_draft(run: Path, config: RunConfig, inputs: dict[str, str]) -> Manifest:
    """Train the draft; the trainer reads its config from run.json and resumes from its last checkpoint."""
    folder = RunFolder(run)
    await run_child([sys.executable, "-m", "eyas.draft.train", "--run", str(folder.root)], log=folder.logs / "train.log")
    return load_manifest(folder.draft)


@task(**OPTIONS, name="export", task_run_name="export", cache_key_fn=cache_key("export"))
async def export_draft(run: Path, config: RunConfig, inputs: dict[str, str]) -> Manifest:
    """Write the best checkpoint as the folder that SGLang and vLLM load."""
    from eyas.draft.export import export_draft as library

    return await asyncio.to_thread(library, RunFolder(run), config)
