"""Extraction against the bare forward pass of the same batches: tokens/s of both, one after the other, and the store's cost.

Goal: at least 95 % of the bare forward. `python -m benchmarks.extract --tokens 30000`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from eyas.config import RunConfig
from eyas.hidden.batching import length_buckets
from eyas.hidden.extract import extract
from eyas.hidden.sources.transformers import TransformersSource, shared_source
from eyas.manifest import Counts, Manifest, file_entries
from eyas.target.precision import native_dtype
from eyas.target.spec import load_target
from eyas.workspace import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--mean", type=int, default=400, help="mean length of a record")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        config = RunConfig.model_validate(
            {
                "prompts": {"datasets": [{"name": "a", "source": "file:x"}]},
                "hidden": {"probe_records": 0, "batch_tokens": arguments.batch_tokens, "dtype": native_dtype()},
            }
        )
        spec = load_target(config.target)
        lengths = write_responses(run, spec.vocab_size, arguments.tokens, arguments.mean)
        source = shared_source(
            spec, dtype=config.hidden.dtype, batch_tokens=config.hidden.batch_tokens, threads=config.hidden.threads
        )
        rows = []
        bare_seconds(source, lengths[:8], arguments.batch_tokens)  # warms the kernels up
        for _ in range(arguments.rounds):
            shutil.rmtree(run.hidden, ignore_errors=True)
            bare = bare_seconds(source, lengths, arguments.batch_tokens)
            start, cpu_start = time.perf_counter(), time.process_time()
            extract(run, config)
            rows.append((bare[0], time.perf_counter() - start, bare[1], time.process_time() - cpu_start))
        total = sum(lengths)
        best_bare, best_extract = (min(row[index] for row in rows) for index in (0, 1))
        print(
            json.dumps(
                {
                    "dtype": config.hidden.dtype,
                    "tokens": total,
                    "threads": torch.get_num_threads(),
                    "bare_tokens_per_s": round(total / best_bare),
                    "extract_tokens_per_s": round(total / best_extract),
                    "share_of_bare_by_cpu": [round(row[2] / row[3], 3) for row in rows],
                    "share_of_bare": [round(row[0] / row[1], 3) for row in rows],
                }
            )
        )


def write_responses(run: RunFolder, vocab_size: int, num_tokens: int, mean: int) -> list[int]:
    """Write random records of log-normal length; returns the lengths."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    folder = run.responses("a")
    folder.mkdir(parents=True)
    with open(folder / "tokenized_data.jsonl", "w") as file:
        while sum(lengths) < num_tokens:
            length = int(np.clip(rng.lognormal(np.log(mean) - 0.2, 0.6), 16, 2048))
            row = {
                "id": f"{len(lengths):032x}", "dataset": "a", "split": "train", "finish_reason": "stop", "prompt_tokens": 8,
                "input_ids": rng.integers(3, vocab_size, length).tolist(), "loss_mask": [0] * 8 + [1] * (length - 8),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            lengths.append(length)
    Manifest(
        stage="generate",
        stage_version=1,
        fingerprint="x",
        counts=Counts.of(done=len(lengths)),
        files=file_entries(folder, ["tokenized_data.jsonl"]),
    ).write(folder)
    return lengths


@torch.inference_mode()
def bare_seconds(source: TransformersSource, lengths: list[int], batch_tokens: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of the decoder's forward over the same padded batches, nothing captured, nothing kept."""
    start, cpu_start = time.perf_counter(), time.process_time()
    for batch in length_buckets(lengths, batch_tokens):
        ids = torch.full((len(batch), lengths[batch[0]]), 7, dtype=torch.int64)
        source.decoder(input_ids=ids, use_cache=False)
    return time.perf_counter() - start, time.process_time() - cpu_start


if __name__ == "__main__":
    main()
