"""Blocks of response files: the unit that worker processes check, and the columns they hand back.

A block starts and ends at a line, holds about 8 MiB, and is checked by whichever process is free; results
are taken in order, so the number of processes changes nothing.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eyas.errors import RecordError
from eyas.merging.records import RecordRules, id_of, parse_record, read_lines
from eyas.merging.spill import Heads, Tokens

T = TypeVar("T")

HEAD = np.dtype(
    [
        ("high", "<u8"), ("low", "<u8"), ("line", "<i8"), ("num_tokens", "<i4"), ("prompt_tokens", "<i4"),
        ("dataset", "<u2"), ("is_heldout", "?"), ("was_cut", "?"),
    ]
)  # fmt: skip
_CONTEXT = multiprocessing.get_context("spawn")  # the caller may hold threads, which do not survive a fork
_INLINE_BYTES = 32 << 20  # below this, starting processes costs more than they save


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines [start, end) of a dataset's file; `dataset` is its index in the config."""

    path: Path
    start: int
    end: int
    dataset: int
    rules: RecordRules


@dataclass(frozen=True, kw_only=True)
class CheckedBlock:
    """The records of a block that passed, in file order, and (line, id, reason, detail) of those that did not."""

    block: Block
    heads: Heads  # [R], lines count from 1 at the block's start
    tokens: Tokens  # payloads end to end
    rejects: list[tuple[int, str | None, str, str]]
    num_lines: int


def cut_blocks(path: Path, dataset: int, rules: RecordRules, block_bytes: int) -> Iterator[Block]:
    """Cut a file into blocks of about `block_bytes`, each ending at a LF or at the end of the file."""
    size_bytes = path.stat().st_size
    start = 0
    with open(path, "rb") as file:
        while start < size_bytes:
            file.seek(min(start + block_bytes, size_bytes) - 1)
            while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
                pass
            end = file.tell()
            yield Block(path=path, start=start, end=end, dataset=dataset, rules=rules)
            start = end


def check_block(block: Block) -> CheckedBlock:
    """Check every line of a block."""
    heads: list[tuple[int, int, int, int, int, int, bool, bool]] = []
    payloads: list[Tokens] = []
    rejects: list[tuple[int, str | None, str, str]] = []
    number = 0
    for _, number, line in read_lines(block.path, block.rules.max_line_bytes, start=block.start, end=block.end):
        if not line:
            continue
        try:
            record = parse_record(line, block.rules)
        except RecordError as error:
            rejects.append((number, id_of(line), error.reason, str(error)))
            continue
        high, low = int(record.id[:16], 16), int(record.id[16:], 16)
        size = len(record.tokens)
        heads.append((high, low, number, size, record.prompt_tokens, block.dataset, record.is_heldout, record.was_cut))
        payloads.append(record.tokens)
    return CheckedBlock(
        block=block,
        heads=np.array(heads, dtype=HEAD),
        tokens=np.concatenate(payloads) if payloads else np.zeros(0, dtype=np.int32),
        rejects=rejects,
        num_lines=number,
    )


def apart(work: Callable[..., T], *given: Any, total_bytes: int) -> T:
    """`work` in a process that ends with it where a merge of `total_bytes` starts processes anyway: what it loads does not stay."""
    if total_bytes < _INLINE_BYTES:
        return work(*given)
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(work, *given).result()


def check_blocks(blocks: Iterator[Block], *, workers: int, total_bytes: int) -> Iterator[CheckedBlock]:
    """Check blocks on `workers` processes, in order, at most two blocks a process ahead of the reader."""
    if workers == 1 or total_bytes < _INLINE_BYTES:
        yield from map(check_block, blocks)
        return
    with ProcessPoolExecutor(workers, mp_context=_CONTEXT) as pool:
        ahead: deque[Future[CheckedBlock]] = deque()
        for block in blocks:
            ahead.append(pool.submit(check_block, block))
            if len(ahead) >= 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
