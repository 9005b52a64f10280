"""The merge against one bare pyarrow pass of the same data (JSON Lines in, Parquet out), with its peak memory.

Synthetic log-normal records. Goals: at least half the speed of the bare pass, peak RSS at most 512 MB, time linear in the
records. `python -m benchmarks.merge --records 20000 --records 80000`; the full size is `--records 1000000 --mean 1400`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.files import digest_file
from eyas.manifest import Counts, FileEntry, Manifest
from eyas.merging.merge import merge
from eyas.workspace import RunFolder

VOCAB_SIZE = 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, action="append")
    parser.add_argument("--mean", type=int, default=1400, help="mean tokens of a record")
    parser.add_argument("--memory-mb", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    for num_records in arguments.records or [20_000]:
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder(Path(folder))
            num_tokens = write_responses(run, num_records, arguments.mean)
            merging = {"max_tokens": 65_536, "memory_bytes": arguments.memory_mb << 20, "workers": arguments.workers}
            raw = {"prompts": {"datasets": [{"name": "a", "source": "file:x"}]}, "merging": merging}
            merge_s, merge_cpu_s, rss_mb, children_mb = in_child(run_merge, run, raw)
            bare_s, bare_cpu_s, _, _ = in_child(run_bare, run, raw)
            copy_s, copy_cpu_s, _, _ = in_child(run_copy, run, raw)
            figures = {
                "records": num_records,
                "tokens": num_tokens,
                "jsonl_mb": round((run.responses("a") / "tokenized_data.jsonl").stat().st_size / 1e6),
                "merge_s": round(merge_s, 2),
                "bare_s": round(bare_s, 2),
                "parquet_copy_s": round(copy_s, 2),
                "share_of_bare_speed": round(bare_s / merge_s, 3),
                "merge_cpu_s": round(merge_cpu_s, 2),
                "bare_cpu_s": round(bare_cpu_s, 2),
                "parquet_copy_cpu_s": round(copy_cpu_s, 2),
                "tokens_per_s": round(num_tokens / merge_s),
                "peak_rss_mb": round(rss_mb),
                "largest_worker_mb": round(children_mb),
            }
            print(json.dumps(figures), flush=True)


def run_merge(run: RunFolder, raw: dict[str, object]) -> None:
    merge(run, RunConfig.model_validate(raw))


def run_bare(run: RunFolder, raw: dict[str, object]) -> None:
    """pyarrow reads the JSON Lines and writes Parquet: nothing checked, nothing shuffled."""
    columns = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    parse = pj.ParseOptions(explicit_schema=columns, unexpected_field_behavior="ignore")
    path = run.responses("a") / "tokenized_data.jsonl"
    with (
        pj.open_json(path, read_options=pj.ReadOptions(block_size=8 << 20), parse_options=parse) as source,
        pq.ParquetWriter(run.merged / "bare.parquet", columns, compression="zstd", compression_level=1) as writer,
    ):
        for batch in source:
            writer.write_batch(batch)


def run_copy(run: RunFolder, raw: dict[str, object]) -> None:
    """The least that is possible: read and write `tokens.parquet` by row groups: nothing checked, nothing shuffled."""
    with (
        pq.ParquetFile(run.merged / "tokens.parquet") as source,
        pq.ParquetWriter(run.merged / "copy.parquet", source.schema_arrow, compression="zstd", compression_level=1) as writer,
    ):
        for group in range(source.num_row_groups):
            writer.write_table(source.read_row_group(group))


def in_child(work: object, run: RunFolder, raw: dict[str, object]) -> tuple[float, float, float, float]:
    """(seconds, CPU seconds, peak RSS in MB, that of its largest child) of `work` in a fresh process, imports left out."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(work, run, raw, sender))
    process.start()
    result: tuple[float, float, float, float] = receiver.recv()
    process.join()
    return result


def _measured(work: object, run: RunFolder, raw: dict[str, object], sender: Connection) -> None:
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    work(run, raw)  # type: ignore[operator]
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    sender.send((seconds, cpu_seconds, *peaks))


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_responses(run: RunFolder, num_records: int, mean: int) -> int:
    """Write random records; returns their tokens. Bodies are drawn from a pool of 500: digits cost more to print than to check."""
    rng = np.random.default_rng(0)
    pool = []
    for length in np.clip(rng.lognormal(np.log(mean) - 0.18, 0.6, 500), 32, 32_768).astype(int).tolist():
        ids = rng.zipf(1.3, length) % VOCAB_SIZE
        mask = [0] * 24 + [1] * (length - 24)
        pool.append((length, f'"input_ids":{ids.tolist()},"loss_mask":{mask}'.replace(" ", "")))
    folder = run.responses("a")
    folder.mkdir(parents=True)
    path = folder / "tokenized_data.jsonl"
    total = 0
    with open(path, "w") as file:
        for number in range(num_records):
            length, body = pool[int(rng.integers(len(pool)))]
            split = "heldout" if number % 20 == 0 else "train"
            head = f'{{"id":"{rng.bytes(16).hex()}","dataset":"a","split":"{split}","prompt_tokens":24,"finish_reason":"stop",'
            file.write(f"{head}{body}}}\n")
            total += length
    entry = FileEntry(path=path.name, size_bytes=path.stat().st_size, sha256=digest_file(path))
    Manifest(stage="generate", stage_version=1, fingerprint="x", counts=Counts.of(done=num_records), files=[entry]).write(folder)
    return total


if __name__ == "__main__":
    main()
