"""Phase 4 as tasks: one per shard of hidden states, then the index over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.progress import recorder
from eyas.workspace import RunFolder
from tasks.caching import OPTIONS, cache_key

if TYPE_CHECKING:
    from eyas.hidden.extract import ShardPlan


@task(**OPTIONS, name="extract", task_run_name="extract {piece}", cache_key_fn=cache_key("extract"))
def extract_shard(run: Path, config: RunConfig, plan: ShardPlan, piece: str, inputs: dict[str, str]) -> None:
    """Compute and store the hidden states of one shard, `piece` = dataset and number; a whole shard costs only its check."""
    from eyas.hidden.extract import extract_shard as library

    library(RunFolder(run), config, plan, report=recorder(RunFolder(run).progress))


@task(**OPTIONS, name="finish extraction", task_run_name="finish extraction", cache_key_fn=cache_key("extract"))
def finish_extraction(run: Path, config: RunConfig, inputs: dict[str, str]) -> Manifest:
    """Index all shards and account for every record."""
    from eyas.hidden.extract import finish_extraction as library

    return library(RunFolder(run), config)
