"""The table of prompts: what it costs in memory, and what it finds."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.generation.records import PromptTable, conversations

MEASURED = """
import sys
from pathlib import Path
from eyas.generation.records import PromptTable
def rss_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
small = PromptTable(Path(sys.argv[1]))
next(iter(small.pending()))
before = rss_mb()
table = PromptTable(Path(sys.argv[2]))
print(len(table), rss_mb() - before)
for prompt in table.rows():
    pass
print(prompt.id, rss_mb() - before)
"""


def _write(path: Path, num_prompts: int, *, tokens: int, group: int) -> list[str]:
    rng = random.Random(num_prompts)
    ids = sorted(f"{rng.getrandbits(128):032x}" for _ in range(num_prompts))
    types = {"id": pa.string(), "split": pa.string(), "input_ids": pa.list_(pa.int32()), "opens_think": pa.bool_()}
    flat = np.random.default_rng(0).integers(0, 1 << 20, group * tokens, dtype=np.int32)  # random: nothing to compress
    offsets = pa.array(np.arange(0, group * tokens + 1, tokens, dtype=np.int32))
    rows = pa.ListArray.from_arrays(offsets, pa.array(flat))
    with pq.ParquetWriter(path, pa.schema({**types, "max_new_tokens": pa.int32()}), use_dictionary=False) as writer:
        for start in range(0, num_prompts, group):
            part = ids[start : start + group]
            columns = [part, ["train"] * group, rows, [False] * group, pa.array([9] * group, type=pa.int32())]
            writer.write_table(pa.table(columns, names=[*types, "max_new_tokens"]))
    return ids


def test_a_prompt_costs_few_bytes_and_rows_are_not_read_ahead(tmp_path: Path) -> None:
    _write(tmp_path / "small.parquet", 10, tokens=4, group=10)
    ids = _write(tmp_path / "large.parquet", 40_000, tokens=400, group=1_000)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "small.parquet"), str(tmp_path / "large.parquet")]
    table, rows = (line.split() for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    assert table[0] == "40000"
    assert float(table[1]) < 25  # 13 bytes a prompt, the rest are buffers
    assert rows[0] == ids[-1]
    assert float(rows[1]) < 40  # the ids alone are 64 MB once read


def test_ids_are_found_even_where_their_first_halves_are_equal(tmp_path: Path) -> None:
    ids = [f"{5:016x}{tail:08x}{0:08x}" for tail in range(4)] + [f"{6:016x}{0:016x}"]
    pq.write_table(pa.table({"id": ids}), tmp_path / "prompts.parquet")
    table = PromptTable(tmp_path / "prompts.parquet")
    assert [table.find(record_id) for record_id in ids] == [0, 1, 2, 3, 4]
    assert [table.find(wrong) for wrong in (f"{5:016x}{9:08x}{0:08x}", f"{4:016x}{0:016x}", "no id", "ab", "")] == [-1] * 5


def test_the_conversations_of_some_rows_come_in_order_and_without_pandas(tmp_path: Path) -> None:
    """pandas would be 45 MB of a process that generates for days."""
    rows = [{"messages": f'[{{"role":"user","content":"{row}"}}]', "tools": "[]", "input_ids": [row]} for row in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    wanted = [([{"role": "user", "content": str(row)}], [], [row]) for row in (0, 255, 256, 599)]
    assert conversations(tmp_path / "prompts.parquet", [599, 256, 0, 255]) == wanted
    code = (
        "import sys; from pathlib import Path; import eyas.generation.session; from eyas.generation.records import conversations\n"
        "print(len(conversations(Path(sys.argv[1]), [0, 300])), 'pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "prompts.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["2", "False"]
