"""docs/prompts.md shows rows and names reasons: the rows are read as it says, and the names are the code's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from eyas.prompts.config import DatasetConfig
from eyas.prompts.converters import CONVERTERS, convert, recognise
from eyas.prompts.readers import is_readable
from eyas.prompts.selection import CHOICE_REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text()
SHAPES = re.findall(r"\*\*`([a-z-]+)`\*\*(.*?)(?=\n\*\*|\n## )", PAGE, re.DOTALL)
ROWS = [(name, row) for name, text in SHAPES for row in re.findall(r"```json\n(.*?)\n```", text, re.DOTALL)]


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_row_that_is_shown_is_recognised_and_ends_with_a_question(name: str, row: str) -> None:
    assert recognise(json.loads(row)) == name
    conversation = convert(json.loads(row))
    assert conversation.messages[-1]["role"] == "user"
    assert conversation.messages[-1]["content"]


def test_every_converter_is_shown() -> None:
    assert (
        {name for name, _ in ROWS}
        == set(CONVERTERS)
        == set(get_args(DatasetConfig.model_fields["converter"].annotation)) - {"auto"}
    )


def test_the_datasets_that_are_shown_are_valid() -> None:
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        value = yaml.safe_load(block)
        for dataset in value["prompts"]["datasets"] if isinstance(value, dict) else value:
            DatasetConfig.model_validate(dataset)


def test_the_names_of_files_are_those_that_are_read() -> None:
    table = PAGE[PAGE.index("| a file's name ends in") : PAGE.index("A row may have up to")]
    for suffix in (".jsonl", ".ndjson", ".json", ".parquet", ".csv"):
        assert f"`{suffix}`" in table
        assert is_readable(Path(f"rows{suffix}"))
    for compression in (".gz", ".bz2", ".xz", ".zst"):
        assert f"`{compression}`" in table
        assert is_readable(Path(f"rows.jsonl{compression}"))


def test_reasons_that_are_no_faults_stand_in_the_first_lines() -> None:
    lines = [line for line in PAGE[PAGE.index("| reason | is |") :].splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z_]+)`", " ".join(line.split(" | ")[0] for line in lines[:4]))) == set(CHOICE_REASONS)
