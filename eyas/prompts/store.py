"""Prompts on disk: `prompts.parquet` in ascending order of id, with an explicit schema.

Ids are hashes, so the order is random with respect to content and any prefix is an honest sample.
Sorting is out of core: rows go to buckets by the first byte of their id, then each bucket is sorted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.files import atomic_file

PROMPTS_NAME = "prompts.parquet"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("conversation", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("opens_think", pa.bool_()),
        ("max_new_tokens", pa.int32()),
    ]
)
_ROWS_PER_GROUP = 512
_BUCKET_BYTES = 16 * 2**20
_GROUP_BYTES = 4 * 2**20


def write_prompts(
    folder: Path, candidates: Iterator[pa.RecordBatch], num_bytes: int, to_prompts: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    """Write `folder/prompts.parquet` from candidates of about `num_bytes`; `to_prompts` gives the kept ones as rows of `SCHEMA`."""
    buckets = folder / ".buckets"
    shutil.rmtree(buckets, ignore_errors=True)
    buckets.mkdir(parents=True)
    try:
        paths = _fill_buckets(buckets, candidates, min(256, 1 + num_bytes // _BUCKET_BYTES), to_prompts)
        with atomic_file(folder / PROMPTS_NAME) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
            for path in paths:
                writer.write_table(_sorted_bucket(path), row_group_size=_ROWS_PER_GROUP)
    finally:
        shutil.rmtree(buckets, ignore_errors=True)


def read_prompts(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of `folder/prompts.parquet` in order of id."""
    for batch in read_prompt_batches(folder):
        yield from batch.to_pylist()


def read_prompt_batches(folder: Path, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of a few rows of `folder/prompts.parquet` in order of id; all columns, or those named."""
    with pq.ParquetFile(folder / PROMPTS_NAME, pre_buffer=False, buffer_size=1 << 20) as file:
        yield from file.iter_batches(batch_size=32, columns=columns)


def _fill_buckets(
    folder: Path,
    candidates: Iterator[pa.RecordBatch],
    num_buckets: int,
    to_prompts: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> list[Path]:
    paths = [folder / f"{index:03d}.arrow" for index in range(num_buckets)]
    with ExitStack() as stack:
        files = [stack.enter_context(pa.OSFile(str(path), "wb")) for path in paths]
        writers = [stack.enter_context(pa.ipc.new_stream(file, SCHEMA)) for file in files]
        for prompts in _grouped(map(to_prompts, candidates)):
            prompts = prompts.take(pc.sort_indices(prompts, sort_keys=[("id", "ascending")]))
            buckets = [int(record[:2], 16) * num_buckets // 256 for record in prompts.column("id").to_pylist()]
            bounds = np.searchsorted(buckets, range(num_buckets + 1))
            for writer, start, stop in zip(writers, bounds, bounds[1:], strict=False):
                if stop > start:
                    writer.write_batch(prompts.slice(start, stop - start))
    return paths


def _grouped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches joined until they hold some megabytes: a batch that is cut into buckets must not become crumbs."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(item.nbytes for item in waiting) >= _GROUP_BYTES:
            yield pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


def _sorted_bucket(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all()
    return table.take(pc.sort_indices(table, sort_keys=[("id", "ascending")]))
