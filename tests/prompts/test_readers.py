from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ConfigError
from eyas.prompts import readers
from eyas.prompts.readers import is_readable, read_rows

_ROWS = [{"prompt": f'number {index} \u2028 {{["\\', "n": index} for index in range(50)]


def _values(path: Path, **settings: int) -> list[object]:
    return [row.value for row in read_rows(path, name=path.name, max_row_bytes=settings.get("max_row_bytes", 1 << 20))]


def _lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in _ROWS)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_every_compression_reads_the_same_rows(tmp_path: Path, suffix: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(pa.compress(_lines(), codec="zstd", asbytes=True) if suffix == ".zst" else compress[suffix](_lines()))
    assert _values(path) == _ROWS
    assert is_readable(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl", _lines()),
        ("rows.jsonl", b"\xef\xbb\xbf" + _lines()),
        ("rows.jsonl", _lines().replace(b"\n", b"\r\n")),
        ("rows.jsonl", _lines().rstrip(b"\n")),
        ("rows.jsonl", b"\n\n" + _lines() + b"\n"),
        ("rows.json", _lines()),
        ("rows.json", json.dumps(_ROWS).encode()),
        ("rows.json", json.dumps(_ROWS, indent=2).encode()),
        ("rows.jsonl", json.dumps(_ROWS, indent=4).encode()),
        ("rows.json", b"\n".join(json.dumps(row, indent=1).encode() for row in _ROWS)),
    ],
)
def test_json_in_any_layout_reads_the_same_rows(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert _values(path) == _ROWS


def test_an_object_whose_values_are_rows_is_read_at_depth_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({str(index): row for index, row in enumerate(_ROWS)}))
    assert [row.value for row in read_rows(path, name="rows.json", max_row_bytes=1 << 20, json_depth=1)] == _ROWS


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(_json, max_size=6),
    indent=st.sampled_from([None, 2]),
    chunk=st.integers(1, 9),
)
def test_an_array_cut_anywhere_gives_the_elements_that_json_gives(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], indent: int | None, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("array") / "rows.json"
    path.write_text(json.dumps(rows, indent=indent))
    original, readers._CHUNK_BYTES = readers._CHUNK_BYTES, chunk
    try:
        assert _values(path) == rows
    finally:
        readers._CHUNK_BYTES = original


def test_every_element_of_an_array_is_a_row(tmp_path: Path) -> None:
    """https://github.com/sgl-project/SpecForge/pull/482: its neighbour, what is no object must not vanish uncounted."""
    path = tmp_path / "rows.json"
    path.write_text('["What, \\"one\\"?", {"prompt": "two"}, "three",null , -4.5,\n[6], broken, true]')
    rows = list(read_rows(path, name="rows.json", max_row_bytes=1 << 20))
    assert [row.value for row in rows] == ['What, "one"?', {"prompt": "two"}, "three", None, -4.5, [6], None, True]
    assert [(row.where, row.problem.reason) for row in rows if row.problem] == [("rows.json:7", "bad_json")]


def test_what_stands_between_rows_that_follow_each_other_is_a_row_as_well(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{\n"prompt": "one"}\nnull "two"\noops {"prompt":\n"three"} 4')
    rows = list(read_rows(path, name="rows.json", max_row_bytes=1 << 20))
    assert [row.value for row in rows] == [{"prompt": "one"}, None, "two", None, {"prompt": "three"}, 4]
    assert [row.where for row in rows if row.problem] == ["rows.json:4"]


def test_elements_above_the_limit_are_each_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 7)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([1, "x" * 100, 2, int("3" * 100), {"prompt": "y" * 100}, "four", None]))
    rows = list(read_rows(path, name="rows.json", max_row_bytes=30))
    assert [row.problem.reason if row.problem else row.value for row in rows] == [
        1,
        "row_too_large",
        2,
        "row_too_large",
        "row_too_large",
        "four",
        None,
    ]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize(
    "torn", ['{"prompt": "torn', '{"prompt": 3,', '{"prompt":', '[{"role": "user"', '{"prompt": "to\\"rn", "n": [1, 2', "[{"]
)
@pytest.mark.parametrize("num_rows", [1, 3, 500])
def test_a_torn_first_line_is_one_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, torn: str, num_rows: int
) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 1 << 12)
    path = tmp_path / name
    path.write_text(torn + "\n" + '{"prompt":"two"}\n' * num_rows)
    rows = list(read_rows(path, name=name, max_row_bytes=1 << 20))
    assert [(row.where, row.problem.reason) for row in rows if row.problem] == [(f"{name}:1", "bad_json")]
    assert [row.value for row in rows[1:]] == [{"prompt": "two"}] * num_rows


@pytest.mark.parametrize(
    "text",
    [
        '[{"n": 0},\n{"n": 1}\n]',
        '[\n{"n": 0}\n,\n{"n": 1}\n]',
        '[{"n": 0}\n,{"n": 1}]',
        '[{"n":\n0}, {"n":\n1}]',
        '{"n":\n0}\n{"n": 1}',
        '{\n"n": 0}\n{"n": 1}',
    ],
)
def test_arrays_and_objects_written_over_lines_are_no_torn_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert _values(path) == [{"n": 0}, {"n": 1}]


def test_a_long_array_whose_rows_stand_on_lines_is_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 1 << 12)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n{"deep":\n{"a": 2}\n}' + ',\n{"a": 3}' * 600 + "]")
    assert len(_values(path)) == 602


def test_a_csv_row_above_the_limit_is_one_reject(tmp_path: Path) -> None:
    """https://github.com/apache/arrow/issues/7835

    Lines, commas, doubled and odd quotes inside of it are no rows; a row may also be one long line, or many small fields.
    """
    path = tmp_path / "rows.csv"
    huge = '"' + "a line, of a field\n".replace('""', '""""') * 50 + '"'
    many = ",".join(["x"] * 300)
    rows = ["a,b", f"1,{huge}", '"two\nlines",2', "y" * 400 + ",3", many, f'"{"z" * 400}""\n""",4', 'o"dd,5']
    path.write_text("\n".join(rows))
    read = list(read_rows(path, name="rows.csv", max_row_bytes=300))
    assert [row.problem.reason if row.problem else row.value for row in read] == [
        "row_too_large",
        {"a": "two\nlines", "b": "2"},
        "row_too_large",
        "row_too_large",
        "row_too_large",
        {"a": 'o"dd', "b": "5"},
    ]
    whole = [row.value for row in read_rows(path, name="rows.csv", max_row_bytes=1 << 20)]
    assert len(whole) == len(read)


@pytest.mark.parametrize("max_row_bytes", [1 << 20, 60])  # the rest of the file within the limit of a row, and above it
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_csv_quote_that_never_closes_costs_its_line_alone(tmp_path: Path, suffix: str, max_row_bytes: int) -> None:
    """https://github.com/sgl-project/SpecForge/pull/482: its neighbour, one bad row that takes all the others with it."""
    path = tmp_path / f"rows.csv{suffix}"
    text = 'a,b\n1,first\n"two\nlines",2\n3,"never closed\n4,fourth\r\n5,"fif""th"\n\n6,' + "six" * 10 + "\n"
    path.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    rows = list(read_rows(path, name="rows.csv", max_row_bytes=max_row_bytes))
    assert [(row.where.split(":")[1], row.problem.reason if row.problem else row.value) for row in rows] == [
        ("2", {"a": "1", "b": "first"}),
        ("3", {"a": "two\nlines", "b": "2"}),
        ("5", "bad_csv"),
        ("6", {"a": "4", "b": "fourth"}),
        ("7", {"a": "5", "b": 'fif"th'}),
        ("9", {"a": "6", "b": "six" * 10}),
    ]
    assert "begins on line 5" in str(rows[2].problem)


def test_csv_rows_around_malformed_quotes_are_each_one_reject(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"open\n2,two\n3,"three"\n4,"fo"ur\n5,"open\n6,six\n"7",seven\n')
    rows = list(read_rows(path, name="rows.csv", max_row_bytes=1 << 20))
    assert [(row.where.split(":")[1], row.problem.reason if row.problem else row.value["a"]) for row in rows] == [
        ("2", "bad_csv"),
        ("3", "2"),
        ("4", "3"),
        ("5", "bad_csv"),
        ("6", "bad_csv"),
        ("7", "6"),
        ("8", "7"),
    ]


_unquoted = st.text(alphabet=st.characters(blacklist_characters='"\r\n', blacklist_categories=["Cs"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(_unquoted, _unquoted), max_size=8), opens=st.lists(st.booleans(), min_size=8, max_size=8))
def test_lines_with_an_open_quote_take_no_other_row_with_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], opens: list[bool]
) -> None:
    """Independent truth: each row is one line here, so each is read or rejected by itself."""
    wanted: list[object] = []
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["a", "b"])
    for row, is_open in zip(rows, opens, strict=False):
        if is_open:
            buffer.write('x,"open\n')
            wanted.append("bad_csv")
        else:
            writer.writerow(row)
            wanted.append(dict(zip("ab", row, strict=True)))
    path = tmp_path_factory.mktemp("open") / "rows.csv"
    path.write_text(buffer.getvalue(), encoding="utf-8", newline="")
    read = list(read_rows(path, name="rows.csv", max_row_bytes=1 << 20))
    assert [row.problem.reason if row.problem else row.value for row in read] == wanted
    assert [row.where for row in read] == [f"rows.csv:{number}" for number in range(2, 2 + len(wanted))]


def test_memory_stays_flat_behind_a_quote_that_never_closes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt\nfirst\n"never closed\n' + "line after line without end\n" * 300_000)
    tracemalloc.start()
    reasons: Counter[str] = Counter()
    for row in read_rows(path, name="rows.csv", max_row_bytes=1 << 16):
        reasons[row.problem.reason if row.problem else "read"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons == {"read": 300_001, "bad_csv": 1}
    assert peak < 2_000_000


def _parquet_with_bad_bytes(path: Path) -> None:
    texts = pa.array([b"one", b"caf\xe9", b"three"]).cast(pa.binary())
    column = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    times = pa.array([0, 1, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": column, "seen": times}), path)


def test_a_parquet_value_that_python_cannot_hold_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    _parquet_with_bad_bytes(path)
    first, second, third = read_rows(path, name="rows.parquet", max_row_bytes=1 << 20)
    assert first.value["prompt"] == "one"
    assert (second.where, second.problem and second.problem.reason) == ("rows.parquet:2", "bad_parquet")
    assert "prompt" in str(second.problem)
    assert third.value == {"prompt": "three"}  # without the time, which nothing reads


def test_a_parquet_dictionary_above_the_limit_is_no_large_row(tmp_path: Path) -> None:
    """https://github.com/apache/arrow/issues/7835: neighbours of a large row keep their own size."""
    path = tmp_path / "rows.parquet"
    texts = [f"{number}" * 100 for number in range(100)] + ["x" * 5000]
    pq.write_table(pa.table({"prompt": pa.array(texts).dictionary_encode()}), path)
    assert _values(path, max_row_bytes=1000) == [{"prompt": text} for text in texts[:-1]] + [None]


def test_a_parquet_row_above_the_limit_is_one_reject(tmp_path: Path) -> None:
    """https://github.com/apache/arrow/issues/7835"""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["one", "x" * 5000, "three"], "turns": [["a"], ["b"], ["y" * 900]]}), path)
    rows = list(read_rows(path, name="rows.parquet", max_row_bytes=1000))
    assert [row.problem.reason if row.problem else row.value["prompt"] for row in rows] == ["one", "row_too_large", "three"]


def test_parquet_columns_that_no_field_names_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = {"ask": [{"text": "one"}, {"text": "two"}], "a.b": ["x", "y"], "video": [None, "v.mp4"], "answer": ["z" * 5000] * 2}
    pq.write_table(pa.table(table), path)

    def read(*fields: str) -> list[object]:
        rows = read_rows(path, name="rows.parquet", max_row_bytes=1000, fields=fields)
        return [row.problem.reason if row.problem else row.value for row in rows]

    assert read() == ["row_too_large"] * 2
    assert read("ask.text", "a.b") == [
        {"ask": {"text": "one"}, "a.b": "x", "video": None},
        {"ask": {"text": "two"}, "a.b": "y", "video": "v.mp4"},
    ]
    assert read("ask.text", "absent") == ["row_too_large"] * 2  # every column, so that the message can name what there is


def test_a_bad_row_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = _lines().split(b"\n")[:-1]
    lines[10] = b'{"prompt": "broken'
    lines[20] = b'{"n": NaN}'
    lines[30] = b"[" * 100_000
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = list(read_rows(path, name="rows.jsonl", max_row_bytes=1 << 20))
    bad = [row for row in rows if row.problem is not None]
    assert [row.where for row in bad] == ["rows.jsonl:11", "rows.jsonl:21", "rows.jsonl:31"]
    assert {row.problem.reason for row in bad if row.problem} == {"bad_json"}
    assert len(rows) == 50


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
@pytest.mark.parametrize("bad", [b"caf\xe9", b"\xe2\x80", b"\xed\xa0\xbd", b"\xff\xfe"])
def test_a_row_with_bytes_that_are_no_utf8_is_one_reject_that_names_them(tmp_path: Path, name: str, bad: bytes) -> None:
    """https://github.com/openai/tiktoken/issues/82: its neighbour, text that would be repaired into another one unseen."""
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_bytes(b"n,prompt\n1,caf\xc3\xa9\n2,b" + bad + b"\n3,c\n")
    else:
        rows = [b'{"n": "1", "prompt": "caf\xc3\xa9"}', b'{"n": "2", "prompt": "b' + bad + b'"}', b'{"n": "3", "prompt": "c"}']
        path.write_bytes(b"[" + b",".join(rows) + b"]" if name.endswith("json") else b"\n".join(rows))
    first, second, third = read_rows(path, name=name, max_row_bytes=1 << 20)
    assert (first.value, third.value) == ({"n": "1", "prompt": "café"}, {"n": "3", "prompt": "c"})
    assert second.problem is not None
    assert second.problem.reason == "not_utf8"
    assert f"byte 0x{bad[3 if bad[:3] == b'caf' else 0]:02x} at" in str(second.problem)
    assert second.where == f"{name}:{3 if name.endswith('csv') else 2}"


def test_a_late_bad_csv_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "n"])
        writer.writerows([[f"line one\nline {index}, with comma", index] for index in range(200)])
        writer.writerow(["one field"])
        writer.writerow(["last", 3])
    rows = list(read_rows(path, name="rows.csv", max_row_bytes=1 << 20))
    assert [row.problem.reason for row in rows if row.problem] == ["bad_csv"]
    assert rows[-1].value == {"prompt": "last", "n": "3"}
    assert len(rows) == 202


def test_parquet_files_of_one_folder_may_differ_in_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "tools": pa.nulls(1)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "tools": ["[]"], "more": [[1]]}), tmp_path / "1.parquet")
    values = [value for path in sorted(tmp_path.glob("*.parquet")) for value in _values(path)]
    assert values == [{"prompt": "a", "tools": None}, {"prompt": "b", "tools": "[]", "more": [1]}]


def test_a_column_that_changes_late_in_a_parquet_file_stays_what_it_is(tmp_path: Path) -> None:
    """All null, then filled; one value over and over (a dictionary), then each its own (plain pages): within one file."""
    tools = pa.array([None] * 2000 + [[{"name": "f"}]] * 1000, pa.list_(pa.struct([("name", pa.string())])))
    prompts = ["same"] * 2000 + [f"{number}" * 200 for number in range(1000)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": prompts, "tools": tools}), path, row_group_size=500, dictionary_pagesize_limit=4096)
    assert _values(path) == pa.table({"prompt": prompts, "tools": tools}).to_pylist()


def test_one_bad_row_in_a_hundred_thousand_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = b'{"prompt":"question"}\n'
    path.write_bytes(line * 77_776 + b'{"prompt":\n' + line * 22_223)
    bad = [row.where for row in read_rows(path, name="rows.jsonl", max_row_bytes=1 << 20) if row.problem is not None]
    assert bad == ["rows.jsonl:77777"]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.xz", "rows.jsonl.zst", "rows.parquet", "rows.json"])
def test_a_damaged_file_is_named_with_the_last_row_read(tmp_path: Path, name: str) -> None:
    random.seed(1)
    good = b"".join(json.dumps({"prompt": random.randbytes(40).hex()}).encode() + b"\n" for _ in range(20_000))
    path = tmp_path / name
    data = {
        ".gz": lambda: gzip.compress(good),
        ".xz": lambda: lzma.compress(good),
        ".zst": lambda: pa.compress(good, codec="zstd", asbytes=True),
        ".parquet": lambda: b"PAR1" + good,
        ".json": lambda: b"[" + good.replace(b"\n", b",\n")[:-2],
    }[Path(name).suffix]()
    path.write_bytes(data[: len(data) - 1000])
    with pytest.raises(ConfigError, match="damaged after row"):
        _values(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.csv"])
def test_memory_stays_flat_while_a_file_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    line = json.dumps({"prompt": "x" * 1000}).encode()
    data = {
        ".jsonl": lambda: (line + b"\n") * 20_000,
        ".json": lambda: b"[" + b",".join([line] * 20_000) + b"]",
        ".gz": lambda: gzip.compress((line + b"\n") * 20_000),
        ".csv": lambda: b"prompt\n" + (b"x" * 1000 + b"\n") * 20_000,
    }[path.suffix]()
    path.write_bytes(data)
    del data
    tracemalloc.start()
    assert sum(row.problem is None for row in read_rows(path, name=name, max_row_bytes=1 << 20)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


def test_memory_stays_flat_while_a_large_row_group_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"prompt": [f"{index}" * 400 for index in range(40_000)]}), path, compression="none", use_dictionary=False
    )
    assert path.stat().st_size > 60_000_000
    before = pa.total_allocated_bytes()
    peak = 0
    for _ in read_rows(path, name="rows.parquet", max_row_bytes=1 << 20):
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 16_000_000
