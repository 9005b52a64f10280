"""The quick way through a line as generation writes it says what the careful way says, or nothing."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import orjson
import pytest

from eyas.errors import RecordError
from eyas.merging.digits import read_ids
from eyas.merging.records import RecordRules, _careful, _compact, parse_record
from tests.merging.responses import VOCAB_SIZE, make_row

RULES = RecordRules(dataset="a", vocab_size=VOCAB_SIZE, max_tokens=4096, max_line_bytes=1 << 20)


def line_of(number: int = 1, **changes: Any) -> bytes:
    return orjson.dumps(make_row(number, **changes))


def careful(line: bytes) -> tuple[dict[str, Any], list[int]] | str:
    try:
        row, tokens = _careful(line, RULES)
    except RecordError as error:
        return error.reason
    return {key: row[key] for key in row if key not in ("input_ids", "loss_mask")}, tokens.tolist()


def test_a_line_of_generation_takes_the_quick_way() -> None:
    for number in range(50):
        line = line_of(number, generated=2 + 37 * number % 90)
        compact = _compact(line, VOCAB_SIZE)
        assert compact is not None
        row, tokens = compact
        assert tokens.dtype == np.int32
        assert ({key: row[key] for key in row if key not in ("input_ids", "loss_mask")}, tokens.tolist()) == careful(line)


def test_a_spoilt_line_never_passes_the_quick_way_unless_it_is_right() -> None:
    rng = random.Random(0)
    taken = 0
    for number in range(4000):
        line = bytearray(line_of(number % 40, generated=3 + number % 9))
        for _ in range(rng.choice((1, 1, 2, 5))):
            place = rng.randrange(len(line))
            piece = rng.choice(
                (b"", b"0", b"9", b",", b"]", b"[", b"-", b" ", b'"', b"\\", b".", b"\xff", b"1e3", b'"input_ids":[1],')
            )
            line[place : place + rng.choice((0, 1))] = piece
        compact = _compact(bytes(line), VOCAB_SIZE)
        if compact is not None:
            taken += 1
            row, tokens = compact
            seen = {key: row[key] for key in row if key not in ("input_ids", "loss_mask")}, tokens.tolist()
            wanted = careful(bytes(line))
            if isinstance(wanted, str):  # the labels, which both ways check after it
                with pytest.raises(RecordError):
                    parse_record(bytes(line), RULES)
            else:
                assert seen == wanted, line
    assert 20 < taken < 2000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line.replace(b'"input_ids":', b'"x":{"input_ids":[7,7,7],"loss_mask":[0,1,1]},"input_ids":', 1),
        lambda line: line[:-1] + b',"input_ids":[7,7,7]}',
        lambda line: line[:-1] + b',"input\\u005fids":[7,7,7]}',
        lambda line: line.replace(b'"id":', b'"note":"\\"input_ids\\":[1,2],\\"loss_mask\\":[0,1]","id":', 1),
        lambda line: line.replace(b'"input_ids":[', b'"input_ids":[ ', 1),
        lambda line: re.sub(rb'"input_ids":\[\d+', b'"input_ids":[007', line, count=1),
        lambda line: re.sub(rb'"input_ids":\[\d+', b'"input_ids":[+7', line, count=1),
        lambda line: re.sub(rb'"input_ids":\[\d+', b'"input_ids":[18446744073709551623', line, count=1),
    ],
)
def test_what_is_written_otherwise_is_left_to_the_careful_way(spoil: Any) -> None:
    line = spoil(line_of())
    assert _compact(line, VOCAB_SIZE) is None


def test_digits_are_read_as_json_reads_them() -> None:
    ids = np.random.default_rng(0).integers(0, 300_000, 500).tolist()
    text = ",".join(map(str, [0, *ids])).encode()
    assert read_ids(text, 300_000).tolist() == [0, *ids]  # type: ignore[union-attr]
    for bad in (b"", b",", b"1,", b",1", b"1,,2", b"01", b"1 2", b"-1", b"1.0", b"300000", b"9" * 40):
        assert read_ids(bad, 300_000) is None
