"""Phase 1 measured: rows per second, peak memory, share of the bare tokenizer's speed, and where the time goes.

    python benchmarks/prepare.py                # 100,000 rows of mixed shapes, and 88,088 of the reference shape
    python benchmarks/prepare.py --rows 5000    # a quick look
    python benchmarks/prepare.py --gigabytes 1  # instead: one file of that size, for its memory

Text is cut from Python's own documentation (English and code), so that a tokenizer works as it does on
real prompts. The bare tokenizer encodes the same rendered prompts in batches and does nothing else, on as
many cores. Every figure comes from this one run; take ratios where the machine is shared.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.prompts.catalogue import REFERENCE_DATASETS
from eyas.prompts.preparation import load_preparation
from eyas.prompts.prepare import prepare
from eyas.prompts.store import read_prompts
from eyas.target.lightly import leave_torch_out
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

REFERENCE_CHARS = {"B1": 1_500, "B2": 1_200, "B3": 1_000, "B4": 800, "B5": 800, "B6": 1_500, "B7": 4_000, "B8": 40_000}
"""Mean characters of a prompt in each dataset: our guess at the reference run's shape, 210 MB in all."""


class Text:
    """Endless text from Python's documentation, in stretches of 8 to 40 words in random order."""

    def __init__(self, seed: int) -> None:
        from pydoc_data.topics import topics

        self.rng = random.Random(seed)
        self._words = " ".join(topics.values()).split(" ")

    def take(self, mean_chars: int) -> str:
        """A text of an exponentially distributed length around `mean_chars`."""
        wanted = max(40, min(mean_chars * 8, round(self.rng.expovariate(1 / mean_chars))))
        parts: list[str] = []
        num_chars = 0
        while num_chars < wanted:
            start = self.rng.randrange(len(self._words))
            part = " ".join(self._words[start : start + self.rng.randint(8, 40)])
            parts.append(part)
            num_chars += len(part) + 1
        return " ".join(parts)


def mixed_row(text: Text, index: int) -> dict[str, Any]:
    """One of six shapes: ShareGPT, OpenAI messages with tools, Alpaca, a prompt, Glaive, an agent trace."""
    match index % 6:
        case 0:
            turns = [{"from": ("human", "gpt")[turn % 2], "value": text.take(500)} for turn in range(4)]
            return {"conversations": turns}
        case 1:
            call = {"type": "function", "function": {"name": "look", "arguments": json.dumps({"at": text.take(40)})}}
            tool = {
                "type": "function",
                "function": {"name": "look", "description": text.take(200), "parameters": {"type": "object"}},
            }
            user = {"role": "user", "content": text.take(400)}
            return {
                "messages": [
                    user,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "content": text.take(300)},
                ],
                "tools": [tool],
            }
        case 2:
            return {"instruction": text.take(200), "input": text.take(600), "output": text.take(600)}
        case 3:
            return {"prompt": text.take(900), "answer": text.take(400)}
        case 4:
            function = json.dumps({"name": "rate", "description": text.take(150), "parameters": {"type": "object"}})
            return {
                "system": f"SYSTEM: You have functions. Use them if required -\n{function}",
                "chat": f"USER: {text.take(300)}\n\n\nASSISTANT: {text.take(300)} <|endoftext|>",
            }
        case _:
            steps = [{"role": ("user", "ai")[turn % 2], "text": text.take(900)} for turn in range(7)]
            return {"trajectory": [{"role": "system", "system_prompt": text.take(600)}, *steps]}


def reasoning_rows(text: Text, num_bytes: float) -> Iterator[dict[str, Any]]:
    """Questions with answers of about 25 kB, as reasoning datasets are; a question of some MB in every 5,000, one 20 MB line."""
    pool = text.take(8_000_000)
    num_written = index = 0
    while num_written < num_bytes:
        question = text.take(2_000_000 if index % 5_000 == 500 else 1_000)
        length = 20_000_000 if index == 1_000 else min(len(pool) // 2, round(text.rng.expovariate(1 / 25_000)))
        start = text.rng.randrange(len(pool) // 2)
        answer = (pool * 4)[:length] if length > len(pool) else pool[start : start + length]
        index += 1
        num_written += len(question) + len(answer)
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> float:
    """Write rows as JSON Lines; returns their size in MB."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path.stat().st_size / 1e6


def measure(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Prepare in a process of its own; wall and CPU seconds, peak resident memory, prompts and tokens."""
    (folder / "config.json").write_text(config.model_dump_json())
    output = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def run_child(folder: Path) -> None:
    """The measured process: load, then prepare."""
    config = RunConfig.model_validate_json((folder / "config.json").read_text())
    leave_torch_out(load_target(config.target))  # as `eyas prepare` does
    load_preparation(config)
    run = RunFolder(folder / "run")
    start, start_cpu = time.perf_counter(), time.process_time()
    manifests = prepare(run, config)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    renderer = load_preparation(config).renderer
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    bare_seconds = bare_cpu_seconds = num_bytes = 0.0
    for dataset in manifests:
        batches: list[list[str]] = []
        batch: list[str] = []
        for row in read_prompts(run.prompts(dataset)):
            batch.append(renderer.render_text(json.loads(row["messages"]), json.loads(row["tools"])))
            if len(batch) == 256 or sum(map(len, batch)) > 1 << 18:
                batches.append(batch)
                batch = []
        batches.append(batch)
        for batch in batches:
            start, start_cpu = time.perf_counter(), time.process_time()
            renderer.encode(batch)
            bare_seconds += time.perf_counter() - start
            bare_cpu_seconds += time.process_time() - start_cpu
            num_bytes += sum(len(text.encode()) for text in batch)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "peak_mb": peak_mb,
                "rows": sum(manifest.counts.num_in for manifest in manifests.values()),
                "prompts": sum(manifest.counts.done for manifest in manifests.values()),
                "tokens": sum(manifest.figures["tokens"]["sum"] for manifest in manifests.values()),
                "prompt_mb": num_bytes / 1e6,
                "bare_seconds": bare_seconds,
                "bare_cpu_seconds": bare_cpu_seconds,
            }
        )
    )


def show(title: str, source_mb: float, result: dict[str, Any]) -> None:
    """Print a result against its goals."""
    seconds, bare_seconds, prompt_mb = result["seconds"], result["bare_seconds"], result["prompt_mb"]
    print(f"\n{title}: {result['rows']:,} rows, {source_mb:.0f} MB of source, {result['tokens']:,} prompt tokens")
    print(f"  {seconds:.1f} s wall, {result['cpu_seconds']:.1f} s CPU; {result['rows'] / seconds:,.0f} rows/s")
    print(f"  {prompt_mb / seconds:.2f} MB of prompts/s, bare tokenizer {prompt_mb / bare_seconds:.2f} MB/s")
    by_clock, by_cpu = bare_seconds / seconds, result["bare_cpu_seconds"] / result["cpu_seconds"]
    print(f"  end to end {by_clock:.0%} of the bare tokenizer by the clock, {by_cpu:.0%} by CPU time (goal: at least 50 %)")
    print(f"  peak memory {result['peak_mb']:.0f} MB (goal: at most 600 MB)")


def show_profile(config: RunConfig, folder: Path) -> None:
    """Where the Python thread's time goes; encoding runs beside it."""
    profile = cProfile.Profile()
    profile.enable()
    prepare(RunFolder(folder / "profiled"), config)
    profile.disable()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = max(value[3] for value in stats.values())
    wanted = {
        ("readers.py", "_parse"): "parse JSON",
        ("converters.py", "convert"): "convert",
        ("cleaning.py", "clean"): "clean",
        ("words.py", "words_of"): "split into words",
        ("duplicates.py", "signature"): "MinHash signature",
        ("contamination.py", "find"): "look for contamination",
        ("rendering.py", "render_text"): "render the template",
        ("candidates.py", "_write_batch"): "write candidates",
        ("selection.py", "select"): "select",
        ("store.py", "write_prompts"): "sort and write prompts",
        ("statistics.py", "add"): "figures",
    }
    print("\nwhere the Python thread's time goes (profiled, so slower than above):")
    found = {(Path(file).name, name): value[3] for (file, _, name), value in stats.items()}
    for key, label in wanted.items():
        print(f"  {label:24} {found.get(key, 0.0) / total:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure phase 1.")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of mixed shapes")
    parser.add_argument(
        "--gigabytes", type=float, default=0.0, help="size of one file of questions with long answers, measured alone"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child)
        return
    root = Path(tempfile.mkdtemp(prefix="eyas-prepare-"))
    try:
        print(f"{os.cpu_count()} cores; target SmolLM2-135M-Instruct's tokenizer")
        text = Text(0)
        if arguments.gigabytes:
            source_mb = write_rows(root / "rows.jsonl", reasoning_rows(text, arguments.gigabytes * 1e9))
            show("one file", source_mb, measure(_config({"reasoning": root / "rows.jsonl"}), root))
            return
        mixed = root / "mixed"
        mixed.mkdir()
        source_mb = write_rows(mixed / "rows.jsonl", (mixed_row(text, index) for index in range(arguments.rows)))
        config = _config({"mixed": mixed / "rows.jsonl"})
        show("mixed shapes", source_mb, measure(config, mixed))
        share = arguments.rows / 100_000
        reference = root / "reference"
        reference.mkdir()
        paths, source_mb = {}, 0.0
        for dataset in REFERENCE_DATASETS:
            paths[dataset.name] = reference / f"{dataset.name}.jsonl"
            chars = REFERENCE_CHARS[dataset.name[:2]]
            rows = ({"prompt": text.take(chars)} for _ in range(round(dataset.quota * share)))
            source_mb += write_rows(paths[dataset.name], rows)
        show("reference shape", source_mb, measure(_config(paths), reference))
        sample = root / "sample.jsonl"
        write_rows(sample, (mixed_row(text, index) for index in range(min(arguments.rows, 5_000))))
        show_profile(_config({"sample": sample}), root)
    finally:
        shutil.rmtree(root)


def _config(paths: dict[str, Path]) -> RunConfig:
    datasets = [{"name": name, "source": f"file:{path}"} for name, path in paths.items()]
    return RunConfig.model_validate({"target": {"context_length": 262_144}, "prompts": {"datasets": datasets, "reject_limit": 1.0}})


if __name__ == "__main__":
    main()
