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


def write_prompts(
    folder: Path, candidates: Iterator[pa.RecordBatch], num_bytes: int, to_prompt: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Write `folder/prompts.parquet` from candidates of about `num_bytes`; `to_prompt` gives a row, or None to leave it out."""
    buckets = folder / ".buckets"
    shutil.rmtree(buckets, ignore_errors=True)
    buckets.mkdir(parents=True)
    try:
        paths = _fill_buckets(buckets, candidates, min(256, 1 + num_bytes // _BUCKET_BYTES), to_prompt)
        with atomic_file(folder / PROMPTS_NAME) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
            for path in paths:
                writer.write_table(_sorted_bucket(path), row_group_size=_ROWS_PER_GROUP)
    finally:
        shutil.rmtree(buckets, ignore_errors=True)


def read_prompts(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of `folder/prompts.parquet` in order of id."""
    with pq.ParquetFile(folder / PROMPTS_NAME, pre_buffer=False, buffer_size=1 << 20) as file:
        for batch in file.iter_batches(batch_size=32):
            yield from batch.to_pylist()


def _fill_buckets(
    folder: Path,
    candidates: Iterator[pa.RecordBatch],
    num_buckets: int,
    to_prompt: Callable[[dict[str, Any]], dict[str, Any] | None],
) -> list[Path]:
    paths = [folder / f"{index:03d}.arrow" for index in range(num_buckets)]
    with ExitStack() as stack:
        files = [stack.enter_context(pa.OSFile(str(path), "wb")) for path in paths]
        writers = [stack.enter_context(pa.ipc.new_stream(file, SCHEMA)) for file in files]
        for batch in candidates:
            rows: list[list[dict[str, Any]]] = [[] for _ in paths]
            for candidate in batch.to_pylist():
                prompt = to_prompt(candidate)
                if prompt is not None:
                    rows[int(prompt["id"][:2], 16) * num_buckets // 256].append(prompt)
            for writer, bucket in zip(writers, rows, strict=True):
                if bucket:
                    writer.write_batch(pa.RecordBatch.from_pylist(bucket, schema=SCHEMA))
    return paths


def _sorted_bucket(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all()
    return table.take(pc.sort_indices(table, sort_keys=[("id", "ascending")]))
