"""Client speed: accepted records per second of one core, validation and journal on, against a server that answers at once.

    python -m benchmarks.generate [--records 3000] [--memory 10000000]

The server runs in its own process and answers every prompt of a class with one prepared body, so that the
figure is the client's. Beside it: the usual script, threads around a chat client that appends text to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import hashlib
import json
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.target.lightly import leave_torch_out
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

ROOT = Path(__file__).parents[1]
MEAN_TOKENS = 1416


def start_server(target: Path, stack: list[subprocess.Popen[str]]) -> str:
    command = [sys.executable, "-m", "tests.sglang.instant", str(target), str(MEAN_TOKENS)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    stack.append(process)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def bench_eyas(folder: Path, target: Path, url: str, count: int) -> None:
    """Generate in a process of its own, which loads what `eyas generate` loads, then again a part of it under a profile."""
    from tests.sglang.tiny import tiny_config, write_prompts

    config = tiny_config(target, {"a": 12_000}, generation={"canary": 16}, server={"max_concurrency": 128})
    write_prompts(RunFolder(folder).create(), config, "a", count)
    write_prompts(RunFolder(folder.with_name("profiled")).create(), config, "a", min(count, 1000))
    (folder / "config.json").write_text(config.model_dump_json())
    subprocess.run([sys.executable, "-m", "benchmarks.generate", "--child", str(folder), "--url", url], check=True, cwd=ROOT)


def run_child(folder: Path, url: str) -> None:
    """The measured process."""
    config = RunConfig.model_validate_json((folder / "config.json").read_text())
    leave_torch_out(load_target(config.target))  # as `eyas generate` does
    from eyas.generation.session import generate

    run = RunFolder(folder)
    count = pq.ParquetFile(run.prompts("a") / "prompts.parquet").metadata.num_rows
    profile = cProfile.Profile()  # by the clock: asking for CPU time at every call is a system call, six times the work itself
    wall, cpu = time.monotonic(), time.process_time()
    asyncio.run(generate(run, config, urls=[url]))
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(
        f"eyas: {count} records, {wall:.1f} s wall, {cpu:.1f} cpu-s: {count / cpu:.0f} records per cpu-s, {count / wall:.0f} per s"
    )
    lines = Path("/proc/self/status").read_text().splitlines()
    memory = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines if line.endswith("kB")}
    print(f"memory: {memory['VmHWM']:.0f} MB at its peak, {memory['RssFile']:.0f} MB of them pages of libraries")
    profile.enable()
    asyncio.run(generate(RunFolder(folder.with_name("profiled")), config, urls=[url]))
    profile.disable()
    stages(profile, 1000 * cpu / count)


STAGES = {
    "encode and send, read the body": ("httpx", "httpcore", "h11", "anyio", "client.py", "/json/"),
    "check the reply": ("replies.py", "pydantic"),
    "decode ids": ("tokenization",),
    "split reasoning": ("reasoning.py",),
    "gates": ("gates.py",),
    "journal and record": ("journal.py", "records.py", "dataset.py", "aiofiles"),
    "pool and session": ("pool.py", "session.py", "asking.py", "telemetry.py", "inflight.py", "scheduler.py"),
}


def stages(profile: cProfile.Profile, record_ms: float) -> None:
    """CPU time per stage: each one's share of the profile, of the `record_ms` that a record takes without a profile."""
    totals = dict.fromkeys([*STAGES, "event loop and the rest"], 0.0)

    def count(file: str, seconds: float) -> None:
        stage = next((key for key, marks in STAGES.items() if any(mark in file for mark in marks)), "event loop and the rest")
        totals[stage] += seconds

    for (file, _, name), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "select" in name or "poll" in name:
            continue
        if file == "~":  # a built-in belongs to who calls it
            for (calling, _, _), (_, _, seconds, _) in callers.items():
                count(calling, seconds)
        else:
            count(file, own)
    print("| stage | CPU ms a record |\n|---|---|")
    for stage, seconds in totals.items():
        print(f"| {stage} | {record_ms * seconds / sum(totals.values()):.2f} |")


def bench_threads(url: str, folder: Path, target: Path, count: int) -> None:
    """The script that people write: a thread pool, a chat client, text appended under a lock. It checks nothing."""
    lock, path = threading.Lock(), folder / "responses.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=128)) as client, open(path, "a") as file:

        def one(number: int) -> None:
            messages = [{"role": "user", "content": f"a question {number}: what is {number} + {number}?"}]
            reply = client.post(f"{url}/v1/chat/completions", json={"model": "x", "messages": messages}).json()
            text = reply["choices"][0]["message"]["content"]
            with lock:
                file.write(json.dumps({"messages": messages, "response": text}) + "\n")
                file.flush()

        wall, cpu = time.monotonic(), time.process_time()
        with ThreadPoolExecutor(128) as pool:
            list(pool.map(one, range(count)))
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(
        f"threads around a chat client: {count / cpu:.0f} records per cpu-s, {count / wall:.0f} per s (text only, nothing checked)"
    )


def bench_memory(folder: Path, count: int) -> None:
    """Memory of ids and states for `count` prompts, measured in a fresh process over a real file."""
    path = folder / "prompts.parquet"
    schema = pa.schema([("id", pa.string())])
    heads = np.sort(np.random.default_rng(0).integers(0, 2**63, count, dtype=np.uint64))
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 200_000):
            ids = [
                f"{head:016x}{hashlib.blake2b(head.tobytes(), digest_size=8).hexdigest()}"
                for head in heads[start : start + 200_000]
            ]
            writer.write_table(pa.table({"id": ids}, schema=schema))
    code = (
        "import sys; from pathlib import Path; import eyas.generation.session; from eyas.generation.records import PromptTable\n"
        "from eyas.config import RunConfig; from eyas.target.lightly import leave_torch_out\n"
        "from eyas.target.spec import load_target; from eyas.target.tokenizer import load_tokenizer\n"
        "spec = load_target(RunConfig().target); leave_torch_out(spec); tokenizer = load_tokenizer(spec)\n"
        "def rss(): return int(next(x for x in open('/proc/self/status') if x.startswith('VmRSS')).split()[1])\n"
        "before = rss(); table = PromptTable(Path(sys.argv[1])); print(before, rss())"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    before, after = (int(value) * 1024 / 1e6 for value in answer.split())
    each = (after - before) * 1e6 / count
    print(
        f"memory: {count} prompts take {after - before:.0f} MB ({each:.1f} B each) over {before:.0f} MB of imports and tokenizer "
        f"(goal: at most {200 + 16 * count / 1e6:.0f} MB in all)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=3000)
    parser.add_argument("--memory", type=int, default=10_000_000, help="prompts of the memory measurement; 0 leaves it out")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.url)
        return
    from tests.sglang.tiny import build_target  # with transformers, which the measured process must load in its own way

    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = build_target(folder / "tiny", context_length=16_384)
        try:
            url = start_server(target, processes)
            bench_eyas(folder / "run", target, url, options.records)
            bench_threads(url, folder / "threads", target, options.records)
        finally:
            for process in processes:
                process.kill()
        if options.memory:
            bench_memory(folder, options.memory)


if __name__ == "__main__":
    main()
