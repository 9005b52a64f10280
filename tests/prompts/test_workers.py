"""Whole processes: the same bytes whatever the number of workers, and flat memory whatever the source."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.files import SEAL, digest_file
from eyas.prompts.store import read_prompts
from eyas.workspace import RunFolder
from tests.prompts.conftest import chat, read_rejects, write_rows

_MOST_BYTES = 600_000_000


def _prepare(config: Path, run: Path, num_workers: int) -> int:
    """Prepare in a process of its own; returns its peak memory in bytes."""
    threads = {name: str(num_workers) for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_IO_THREADS")}
    environment = {**os.environ, **threads, "PYTHONHASHSEED": str(num_workers), "TOKENIZERS_PARALLELISM": "true"}
    words = [sys.executable, "-m", "tests.prompts.worker_child", str(config), str(run), str(num_workers)]
    return int(subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout)


def _contents(run: Path) -> dict[str, Any]:
    """Digest of every file of a run; manifests as values, without the times that they were written at and the seal over these."""
    found: dict[str, Any] = {}
    for path in sorted(item for item in run.rglob("*") if item.is_file()):
        if path.name != "manifest.json":
            found[str(path.relative_to(run))] = digest_file(path)
            continue
        manifest = json.loads(path.read_text())
        found[str(path.relative_to(run))] = {
            key: value for key, value in manifest.items() if not key.endswith("_at") and key != SEAL
        }
    return found


def test_one_worker_and_many_write_the_same_bytes(tmp_path: Path, make_config) -> None:
    rng = random.Random(3)
    words = [f"word{number}" for number in range(2000)]
    shared = [chat(" ".join(rng.choices(words, k=40))) for _ in range(60)]
    paths: dict[str, Path] = {}
    for name in ("A", "B", "C", "D"):
        own = [chat(*(" ".join(rng.choices(words, k=rng.randint(3, 60))) for _ in range(rng.choice([1, 3])))) for _ in range(300)]
        rows: list[Any] = [*own, *shared, b"{broken", {"conversations": []}]
        rng.shuffle(rows)
        paths[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    config = tmp_path / "config.json"
    config.write_text(make_config(paths, subsample=0.9).model_dump_json())
    for num_workers in (1, 4):
        _prepare(config, tmp_path / f"run{num_workers}", num_workers)
    one, many = _contents(tmp_path / "run1"), _contents(tmp_path / "run4")
    assert one == many
    assert {Path(name).name for name in one} == {"candidates.arrow", "rejects.jsonl", "prompts.parquet", "manifest.json"}
    assert sum(manifest["rejected_by_reason"].get("duplicate", 0) for manifest in one.values() if isinstance(manifest, dict)) == 180


@pytest.mark.soak
def test_a_file_of_a_gigabyte_costs_the_memory_of_its_rows(tmp_path: Path, make_config) -> None:
    """A hole of 1 GB (zeros that take no disk) inside one line, and a line of 20 MB, among rows that are kept."""
    path = tmp_path / "rows.jsonl"
    with open(path, "wb") as file:
        file.write(b"".join(json.dumps(chat(f"first {number}")).encode() + b"\n" for number in range(1000)))
        file.seek(1 << 30, os.SEEK_CUR)
        file.write(b"\n" + json.dumps(chat("y" * 20_000_000)).encode() + b"\n")
        file.write(b"".join(json.dumps(chat(f"then {number}")).encode() + b"\n" for number in range(1000)))
    assert path.stat().st_blocks * 512 < 100_000_000 < 1 << 30 < path.stat().st_size
    config = tmp_path / "config.json"
    config.write_text(make_config({"B": path}, near_duplicates=False).model_dump_json())
    assert _prepare(config, tmp_path / "run", 2) < _MOST_BYTES
    path.unlink()
    run = RunFolder(tmp_path / "run")
    found = [(reject["reason"], reject["where"]) for reject in read_rejects(run, "B")]
    assert found == [("row_too_large", "rows.jsonl:1001"), ("row_too_large", "rows.jsonl:1002")]
    assert sum(1 for _ in read_prompts(run.prompts("B"))) == 2000


@pytest.mark.soak
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_hundred_thousand_rows_with_a_bad_one(tmp_path: Path, make_config, name: str) -> None:
    path, rows = tmp_path / name, [chat(f"question {number} of many") for number in range(100_000)]
    rows[77_776] = {"conversations": [{"from": "narrator", "value": "x"}]}
    if name.endswith("jsonl"):
        write_rows(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = tmp_path / "config.json"
    config.write_text(make_config({"B": path}, near_duplicates=False).model_dump_json())
    assert _prepare(config, tmp_path / "run", 2) < _MOST_BYTES
    run = RunFolder(tmp_path / "run")
    assert [(reject["reason"], reject["where"]) for reject in read_rejects(run, "B")] == [("unknown_role", f"{name}:77777")]
    assert sum(1 for _ in read_prompts(run.prompts("B"))) == 99_999
