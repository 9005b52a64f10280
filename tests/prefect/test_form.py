"""The form of the pipeline as Prefect's UI gets it: no toggles of types, descriptions that say bounds, wrong values refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import is_valid_schema
from prefect.utilities.schema_tools.validation import validate

from eyas.config import RunConfig
from eyas.target.config import TargetConfig
from flows.pipeline import pipeline

SCHEMA: dict[str, Any] = parameter_schema(pipeline).model_dump()
OF_THE_FORM = {"run", "server_block", "host_block", "storage_block", "until", "name"}


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every box."""
    for name, box in SCHEMA["definitions"].items():
        for field, schema in box["properties"].items():
            yield f"{name}.{field}", schema


def values(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"run": "runs/a", **sections}


def test_the_schema_is_one_that_the_server_accepts() -> None:
    is_valid_schema(SCHEMA)


def test_no_field_is_a_toggle_of_types() -> None:
    assert [name for name, schema in fields() if "anyOf" in schema or "oneOf" in schema] == []


def test_no_choice_is_one_that_the_form_shows_as_empty() -> None:
    """Prefect's select shows 0 and "" as nothing, so neither can be seen nor chosen."""
    assert [name for name, schema in fields() if not all(schema.get("enum", [True]))] == []


def test_labels_spell_out_units_and_objects_show_how_they_are_written() -> None:
    titles = {name: schema["title"] for name, schema in fields() if "title" in schema}
    assert titles["OperateConfig.stall_s"] == "Stall (seconds)"
    assert titles["ServerConfig.min_tokens_per_s"] == "Min Tokens Per Second"
    assert titles["PromptsConfig.max_row_bytes"] == "Max Row (bytes)"
    assert [title for title in titles.values() if title.endswith(" S")] == []
    written = [name for name, schema in fields() if schema.get("type") == "object" and '`{"' not in schema["description"]]
    assert written == []


def test_what_a_person_changes_most_stands_before_the_long_sections() -> None:
    properties = SCHEMA["properties"]
    order = sorted(properties, key=lambda name: int(properties[name]["position"]))
    assert order[:6] == ["run", "until", "server_block", "host_block", "storage_block", "target"]
    assert order[-1] == "operate"


def test_every_value_is_described_and_its_bounds_are_said() -> None:
    bounded = 0
    for name, schema in fields():
        if "$ref" in schema:  # a box: its own docstring describes it
            assert SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]["description"], name
            continue
        assert schema["description"].rstrip().endswith("."), name
        bounds = {"minimum": "t least", "exclusiveMinimum": "bove", "maximum": "t most", "exclusiveMaximum": "elow"}
        for key, word in bounds.items():
            if key in schema:
                bounded += 1
                assert f"{word} {schema[key]:,}" in schema["description"], name
    assert bounded > 50


def test_fields_stand_in_the_order_of_the_code_whatever_sorts_their_keys() -> None:
    """PostgreSQL keeps a schema as jsonb, shortest key first; the UI sorts by `position`."""
    target = SCHEMA["definitions"]["TargetConfig"]["properties"]
    assert sorted(target, key=lambda name: int(target[name]["position"])) == list(TargetConfig.model_fields)
    assert all("position" in schema for name, schema in fields())


def test_every_box_of_the_form_is_a_section_of_the_config() -> None:
    assert set(SCHEMA["properties"]) - OF_THE_FORM == set(RunConfig.model_fields) - OF_THE_FORM
    assert all(schema["description"] for schema in SCHEMA["properties"].values())
    assert SCHEMA.get("required", []) == []


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"generation": {"sampling": {"temperature": 9}}}, "9 is greater than the maximum of 5"),
        ({"target": {"always_reasons": "perhaps"}}, "'perhaps' is not one of"),
        ({"draft": {"num_unroll_steps": 0}}, "0 is less than the minimum of 1"),
        ({"draft": {"zero_stage": 4}}, "4 is greater than the maximum of 3"),
        ({"prompts": {"subsample": "half"}}, "'half' is not of type 'number'"),
        ({"hidden": {"sauce": "sglang"}}, "'sauce' was unexpected"),
    ],
)
def test_a_wrong_value_is_refused_with_its_reason(section: dict[str, Any], reason: str) -> None:
    """The server runs this very function on what the form sends, before it makes a run."""
    with pytest.raises(Exception, match=reason):
        validate(values(**section), SCHEMA, raise_on_error=True)


def test_right_values_pass() -> None:
    config = RunConfig().model_dump(mode="json", exclude={"name"})
    assert validate(values(**config), SCHEMA, raise_on_error=False) == []
