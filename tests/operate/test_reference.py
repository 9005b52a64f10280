"""The config's reference is the models' own, and the committed one is current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eyas.config import RunConfig, parse_config
from eyas.generation.config import GateConfig
from eyas.operate.reference import render_reference

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def leaves(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Every key of a config, as the tree that a run records holds it."""
    if not isinstance(value, BaseModel) or isinstance(value, GateConfig):  # a gate is a value of two shares
        return {path}
    return {leaf for name in type(value).model_fields for leaf in leaves(getattr(value, name), (*path, name))}


def rows_of(page: str) -> dict[str, dict[str, list[str]]]:
    """Section to key to cells."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            rows = sections.setdefault(line[3:], {})
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")]
            rows[cells[0].strip("`")] = cells[1:]
    return sections


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text() == render_reference(), "run: make docs"


def test_every_key_stands_with_type_default_and_a_sentence() -> None:
    sections = rows_of(render_reference())
    for *path, name in leaves(RunConfig()):
        section = ".".join(path) or "top"
        cells = sections[section][name]
        assert len(cells) == 3, (section, name, cells)
        assert all(cells), (section, name, cells)


def test_units_bounds_and_choices_are_the_models() -> None:
    sections = rows_of(render_reference())
    assert sections["draft"]["num_unroll_steps"][:2] == ["integer", "`4`"]
    assert sections["draft"]["num_unroll_steps"][2].endswith("At least 1 and at most 8.")
    assert sections["hidden"]["codec"][0] == "one of `bf16`, `fp8`, `int4`, `int4_top`"
    assert sections["prompts.datasets"]["source"][1] == "required"
    assert sections["benchmark.grid"].keys() == {"num_steps", "top_k", "num_verified"}


def test_what_the_page_calls_a_default_is_what_an_empty_config_gets() -> None:
    config = parse_config({}, where="nothing").model_dump(mode="json")
    for section, rows in rows_of(render_reference()).items():
        node: Any = config
        for part in [] if section == "top" else section.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        for name, cells in rows.items() if isinstance(node, dict) else ():
            assert json.loads(cells[1].strip("`")) == node[name], (section, name)
