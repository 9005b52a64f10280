"""Prompts in and responses out: the rows of `prompts.parquet`, of the journal and of `tokenized_data.jsonl`.

Prompts are streamed; what stays in memory is 13 bytes a prompt (12 of its id, and its state). The journal holds what a reply
brought and where it came from; `tokenized_data.jsonl` is prompts joined with the journal in the order of the
prompts, holds nothing that depends on when or where a reply was made, and so is the same bytes however often
the run was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import ArtifactError
from eyas.generation.journal import sealed
from eyas.sglang.replies import Reply
from eyas.target.reasoning import Spans

PROMPTS_NAME = "prompts.parquet"
PENDING, DONE, REJECTED = 0, 1, 2
_BATCH_ROWS = 256
_ID_PARTS = np.dtype([("head", ">u8"), ("tail", ">u4"), ("rest", ">u4")])
_COLUMNS = ["id", "split", "input_ids", "opens_think", "max_new_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of `prompts.parquet`; `index` is its position in the file."""

    index: int
    id: str
    split: str
    input_ids: list[int]
    opens_think: bool
    max_new_tokens: int


class PromptTable:
    """The prompts of one dataset: ids and states in memory, rows from the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with _open(path) as file:
                num_rows = file.metadata.num_rows
                self._heads = np.empty(num_rows, dtype=np.uint64)  # the id's first eight bytes; ascending, so searchable
                self._tails = np.empty(num_rows, dtype=np.uint32)  # the next four: twelve tell any two of 10 million ids apart
                row = 0
                for batch in file.iter_batches(batch_size=65_536, columns=["id"]):
                    raw = bytes.fromhex("".join(batch.column(0).to_pylist()))
                    parts = np.frombuffer(raw, dtype=_ID_PARTS)
                    self._heads[row : row + batch.num_rows] = parts["head"]
                    self._tails[row : row + batch.num_rows] = parts["tail"]
                    row += batch.num_rows
        except (OSError, ValueError, TypeError) as error:
            raise ArtifactError(f"{path} cannot be read as prompts ({error}); run phase 'prepare' again") from error
        if not np.all(self._heads[:-1] <= self._heads[1:]):
            raise ArtifactError(f"{path} does not stand in ascending order of id; run phase 'prepare' again")
        self.states = np.zeros(num_rows, dtype=np.uint8)
        pa.default_memory_pool().release_unused()  # 30 MB of buffers that would stay for days

    def __len__(self) -> int:
        return len(self.states)

    def find(self, record_id: str) -> int:
        """Row of `record_id`, or -1 if no prompt has it."""
        try:
            ((head, tail, _),) = np.frombuffer(bytes.fromhex(record_id), dtype=_ID_PARTS).tolist()
        except ValueError:
            return -1
        row = int(np.searchsorted(self._heads, np.uint64(head)))
        while row < len(self) and self._heads[row] == head:
            if self._tails[row] == tail:
                return row
            row += 1
        return -1

    def count(self, state: int) -> int:
        return int(np.count_nonzero(self.states == state))

    def pending(self) -> Iterator[Prompt]:
        """Stream the rows that are pending when they are reached, in file order."""
        for prompt in self.rows():
            if self.states[prompt.index] == PENDING:
                yield prompt

    def rows(self) -> Iterator[Prompt]:
        """Stream every row in file order."""
        index = 0
        with _open(self.path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=_COLUMNS):
                columns = batch.to_pydict()
                for values in zip(*(columns[name] for name in _COLUMNS), strict=True):
                    yield Prompt(
                        index=index,
                        id=values[0],
                        split=values[1],
                        input_ids=values[2],
                        opens_think=values[3],
                        max_new_tokens=values[4],
                    )
                    index += 1


def conversations(path: Path, rows: list[int]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]]:
    """(messages, tools, input_ids) of some rows of a `prompts.parquet`, in ascending order of row."""
    wanted, found, start = set(rows), [], 0
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=["messages", "tools", "input_ids"]):
            here = sorted(row - start for row in wanted if start <= row < start + batch.num_rows)
            found += [
                (orjson.loads(row["messages"]), orjson.loads(row["tools"]), row["input_ids"])
                for index in here  # no take(): it imports pandas, 45 MB that would stay for days
                for row in batch.slice(index, 1).to_pylist()
            ]
            start += batch.num_rows
            if len(found) == len(wanted):
                break
    return found


def rows_with_tools(path: Path, limit: int) -> list[int]:
    """The first `limit` rows whose prompt has tools."""
    found: list[int] = []
    start = 0
    with _open(path) as file:
        for batch in file.iter_batches(batch_size=4096, columns=["tools"]):
            found += [start + row for row, tools in enumerate(batch.column(0).to_pylist()) if tools not in ("", "[]")]
            start += batch.num_rows
            if len(found) >= limit:
                break
    return found[:limit]


def done_entry(prompt: Prompt, reply: Reply, spans: Spans, provenance: dict[str, Any]) -> dict[str, Any]:
    """The journal's entry of an accepted reply; spans are positions in prompt + output."""
    return {
        "id": prompt.id,
        "output_ids": reply.output_ids,
        "prompt_tokens": reply.prompt_tokens,
        "finish_reason": reply.finish_reason,
        "spans": {"reasoning": spans.reasoning, "answer": spans.answer, "tool_calls": spans.tool_calls},
        "is_closed": spans.is_closed,
        "cached_tokens": reply.cached_tokens,
        "text_match": reply.text_match,
        "weight_version": reply.weight_version,
        "queue_time_s": reply.queue_time_s,
        "e2e_s": reply.e2e_s,
        **provenance,
    }


def reject_entry(prompt: Prompt, reason: str, detail: str, provenance: dict[str, Any]) -> dict[str, Any]:
    """The journal's entry of a rejected record."""
    return {"id": prompt.id, "reject": reason, "detail": detail, **provenance}


def journal_line(entry: dict[str, Any]) -> bytes:
    """An entry as one line of the journal, its checksum last."""
    return sealed(orjson.dumps(entry)) + b"\n"


def tokenized_line(dataset: str, prompt: Prompt, entry: dict[str, Any]) -> bytes:
    """One row of `tokenized_data.jsonl` from a prompt and its journal line (docs/formats.md)."""
    output_ids = entry["output_ids"]
    return orjson.dumps(
        {
            "id": prompt.id,
            "dataset": dataset,
            "split": prompt.split,
            "input_ids": prompt.input_ids + output_ids,
            "loss_mask": [0] * len(prompt.input_ids) + [1] * len(output_ids),
            "prompt_tokens": len(prompt.input_ids),
            "finish_reason": entry["finish_reason"],
            "spans": entry["spans"],
            "seed": entry["seed"],
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )


def _open(path: Path) -> pq.ParquetFile:
    """Open for streaming; by default pyarrow reads every row group ahead and keeps it (290 MB for 10 million ids)."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
