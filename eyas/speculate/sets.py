"""The prompts of the benchmark: this run's held-out ones, standard sets from packages, one's own from a file."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.workspace import RunFolder

HELDOUT = "heldout"


@dataclass(frozen=True, kw_only=True)
class BenchmarkPrompt:
    """One rendered prompt; `dataset` is the run's dataset for held-out prompts, otherwise the set's name."""

    id: str
    dataset: str
    input_ids: list[int]


def set_name(source: str) -> str:
    """Short name of a set for folders and tables: `package:mt-bench` → `mt-bench`, `file:/a/own.jsonl` → `own`."""
    kind, separator, name = source.partition(":")
    if not separator:
        return kind
    return name.rsplit("/", 1)[-1].split(".")[0]


def heldout_prompts(run: RunFolder, config: RunConfig, count: int) -> list[BenchmarkPrompt]:
    """`count` held-out prompts, dealt from the datasets in turn, each in order of id (random as to content).

    Raises `ConfigError` where the run has none.
    """
    piles = [_heldout_of(run, dataset.name, count) for dataset in config.prompts.datasets]
    dealt = [pile[turn] for turn in range(count) for pile in piles if turn < len(pile)]
    if not dealt:
        raise ConfigError(
            "benchmark.sets names heldout, but no prompt was held out; raise prompts.heldout_share or leave the set out"
        )
    return dealt[:count]


def _heldout_of(run: RunFolder, dataset: str, count: int) -> list[BenchmarkPrompt]:
    table = pq.read_table(run.prompts(dataset) / "prompts.parquet", columns=["id", "split", "input_ids"])
    rows = table.filter(pc.equal(table["split"], HELDOUT)).slice(0, count).to_pylist()
    return [BenchmarkPrompt(id=row["id"], dataset=dataset, input_ids=row["input_ids"]) for row in rows]
