"""The rows of `tokenized_data.jsonl`, checked one by one: what training and extraction may rely on.

A record that passes has ids inside the vocabulary, a mask that is 0 on the prompt and 1 on every generated
id, and at least two generated ids after the length cap (one supervised position needs two). A record
that fails is a `RecordError` with one of `REASONS`. A line as generation writes it costs about 20 µs of CPU at
1,400 tokens: ids and mask, 98 % of its bytes, are read without a JSON parser; any other line goes the careful way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from eyas.errors import RecordError

RESPONSES_NAME = "tokenized_data.jsonl"
REASONS = (
    "not_json", "line_too_long", "missing_key", "bad_id", "duplicate_id", "wrong_dataset", "bad_split", "bad_finish_reason",
    "bad_ids", "id_out_of_range", "bad_prompt_tokens", "mask_length", "mask_misaligned", "no_supervised_token",
)  # fmt: skip
MIN_GENERATED_IDS = 2
_ID = re.compile(r"[0-9a-f]{32}")
_ID_KEY = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')
_IDS, _MASK = b'"input_ids":[', b',"loss_mask":['
_LONGEST_REST = 4096
_KEYS = ("id", "dataset", "split", "input_ids", "loss_mask", "prompt_tokens", "finish_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """One checked response, cut at the length cap; the mask is 0 on `prompt_tokens` ids and 1 on the rest."""

    id: str
    is_heldout: bool
    prompt_tokens: int
    tokens: npt.NDArray[np.int32]  # [T]
    was_cut: bool

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """[T], 1 on generated ids."""
        mask = np.ones(len(self.tokens), dtype=np.uint8)
        mask[: self.prompt_tokens] = 0
        return mask


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRules:
    """What a record of one dataset is checked against."""

    dataset: str
    vocab_size: int
    max_tokens: int
    max_line_bytes: int


def parse_record(line: bytes, rules: RecordRules) -> ResponseRecord:
    """Check one line and cut it at `max_tokens`; raises `RecordError` with the first reason that applies."""
    if len(line) > rules.max_line_bytes:
        raise RecordError("line_too_long", f"{len(line)} bytes, at most {rules.max_line_bytes}")
    compact = _compact(line, rules.vocab_size)
    row, tokens = compact if compact is not None else _careful(line, rules)
    _check_labels(row, rules)
    prompt_tokens = row["prompt_tokens"]
    kept = min(len(tokens), rules.max_tokens)
    if kept - prompt_tokens < MIN_GENERATED_IDS:
        raise RecordError(
            "no_supervised_token",
            f"{max(0, kept - prompt_tokens)} generated ids are left of {len(tokens)} tokens at a cap of {rules.max_tokens}, "
            f"wanted {MIN_GENERATED_IDS}",
        )
    return ResponseRecord(
        id=row["id"],
        is_heldout=row["split"] == "heldout",
        prompt_tokens=prompt_tokens,
        tokens=tokens[:kept],
        was_cut=kept < len(tokens),
    )


def id_of(line: bytes) -> str | None:
    """The id that a line seems to have, for the account of rejects; None if it shows none."""
    found = _ID_KEY.search(line, 0, 256)
    return found.group(1).decode() if found else None


def read_lines(path: Path, max_line_bytes: int, *, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Yield (byte position, number, line without LF) of every line in [start, end) of a file; splits on LF only.

    `start` is the beginning of a line, numbers count from 1 there. A blank line, which holds no record, comes as b"".
    Of a line longer than `max_line_bytes` only one byte more than that is kept, so that it is seen to be
    too long without being held in memory.
    """
    with open(path, "rb") as file:
        file.seek(start)
        position, number = start, 0
        while end is None or position < end:
            line = file.readline(max_line_bytes + 2)
            if not line:
                return
            number += 1
            size = len(line)
            while not line.endswith(b"\n") and (more := file.readline(1 << 20)):
                size += len(more)
                if more.endswith(b"\n"):
                    break
            yield position, number, line.strip(b" \t\r\n")
            position += size


def _compact(line: bytes, vocab_size: int) -> tuple[dict[str, Any], npt.NDArray[np.int32]] | None:
    """Row and ids of a line that is written as generation writes it and right in ids and mask; None tells nothing of the line."""
    from eyas.merging.digits import read_ids  # numba takes 120 MB: only the processes that check lines load it

    start = line.find(_IDS, 0, _LONGEST_REST)
    end = line.find(b"]", start)
    if start < 0 or end < 0 or not line.startswith(_MASK, end + 1):
        return None
    tokens = read_ids(line[start + len(_IDS) : end], vocab_size)
    mask_start, mask_end = end + 1 + len(_MASK), line.find(b"]", end + 1)
    rest = line[: start + len(_IDS)] + line[end : end + 1 + len(_MASK)] + line[mask_end:]  # both lists empty
    if tokens is None or len(rest) > _LONGEST_REST or b"\\" in rest or rest.count(b'"input_ids"') * rest.count(b'"loss_mask"') != 1:
        return None
    try:
        row = orjson.loads(rest)
    except ValueError:
        return None
    if not isinstance(row, dict) or any(key not in row for key in _KEYS):
        return None
    prompt_tokens = row["prompt_tokens"]
    if type(prompt_tokens) is not int or not 1 <= prompt_tokens <= len(tokens):
        return None
    mask = b"0," * prompt_tokens + b"1," * (len(tokens) - prompt_tokens)
    return (row, tokens) if line[mask_start:mask_end] == mask[:-1] else None


def _careful(line: bytes, rules: RecordRules) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    """Row and ids of any line; raises `RecordError` with what is wrong."""
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise RecordError("not_json", str(error)) from error
    if not isinstance(row, dict):
        raise RecordError("not_json", f"a {type(row).__name__}, wanted an object")
    missing = [key for key in _KEYS if key not in row]
    if missing:
        raise RecordError("missing_key", f"no {', '.join(missing)}")
    _check_labels(row, rules)
    tokens = _checked_tokens(row["input_ids"], rules.vocab_size)
    prompt_tokens = row["prompt_tokens"]
    if type(prompt_tokens) is not int or not 1 <= prompt_tokens <= len(tokens):
        raise RecordError("bad_prompt_tokens", f"prompt_tokens is {prompt_tokens!r}, wanted 1 to {len(tokens)}")
    _check_mask(row["loss_mask"], prompt_tokens, len(tokens))
    return row, tokens


def _check_labels(row: dict[str, Any], rules: RecordRules) -> None:
    if not isinstance(row["id"], str) or not _ID.fullmatch(row["id"]):
        raise RecordError("bad_id", f"id is {row['id']!r:.60}, wanted 32 lowercase hex digits")
    if row["dataset"] != rules.dataset:
        raise RecordError("wrong_dataset", f"dataset is {row['dataset']!r:.60}, wanted {rules.dataset!r}")
    if row["split"] not in ("train", "heldout"):
        raise RecordError("bad_split", f"split is {row['split']!r:.60}, wanted train or heldout")
    if row["finish_reason"] not in ("stop", "length"):
        raise RecordError("bad_finish_reason", f"finish_reason is {row['finish_reason']!r:.60}, wanted stop or length")


def _checked_tokens(ids: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise RecordError("bad_ids", "input_ids is not a list of integers with at least one item")
    smallest, largest = min(ids), max(ids)
    if smallest < 0 or largest >= vocab_size:
        seen = smallest if smallest < 0 else largest
        raise RecordError(
            "id_out_of_range", f"id {seen} at position {ids.index(seen)}, wanted 0 to {vocab_size - 1}; another tokenizer made it"
        )
    return np.array(ids, dtype=np.int32)


def _check_mask(mask: Any, prompt_tokens: int, num_tokens: int) -> None:
    if not isinstance(mask, list) or len(mask) != num_tokens:
        seen = len(mask) if isinstance(mask, list) else type(mask).__name__
        raise RecordError("mask_length", f"loss_mask has {seen} items, input_ids {num_tokens}")
    wanted = [0] * prompt_tokens + [1] * (num_tokens - prompt_tokens)
    if mask != wanted:
        position = next(index for index, (seen, want) in enumerate(zip(mask, wanted, strict=True)) if seen != want)
        raise RecordError(
            "mask_misaligned",
            f"loss_mask[{position}] is {mask[position]!r}, wanted {wanted[position]}: 0 on the {prompt_tokens} prompt ids, 1 after",
        )
