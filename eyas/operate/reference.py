"""The reference of the config, from the models that check it: `docs/config.md` is this module's output.

    python -m eyas.operate.reference > docs/config.md

Types and defaults are the models' own; a field's unit and bounds stand in its description (`eyas.settings`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eyas.config import RunConfig

HEAD = """\
# The config, key by key

Made by `make docs` from the models that check a config; do not edit. A config is a YAML file of these keys, as in \
`deployments/presets/`; a key that is left out has its default, an unknown one is refused. On the command line \
`--set draft.epochs=2` changes one value, in a list by number: `--set prompts.datasets.0.quota=100`. Sizes in bytes are plain \
numbers; what is called a share lies between 0 and 1; the end of a name gives the unit (`_s` seconds, `_bytes` bytes, \
`_tokens` tokens).
"""


def render_reference() -> str:
    """All keys of a run's config as Markdown: one table for each section, in the order of the code."""
    return HEAD + "".join(_sections(RunConfig, ""))


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    rows: list[str] = []
    below: dict[type[BaseModel], list[str]] = {}
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is None or field.description:  # a section is described by its model, a value that is a mapping by its field
            rows.append(_row(name, field, properties[name], inner))
        if inner is not None:
            below.setdefault(inner, []).append(name)
    if rows:
        says = " ".join((model.__doc__ or "").split()) if path else "Beside the sections below."
        table = ["| key | type | default | what |", "|---|---|---|---|", *rows]
        yield "\n".join(["", f"## {path or 'top'}", "", says, "", *table, ""])
    for inner, names in below.items():
        yield from _sections(inner, f"{path}.{', '.join(names)}" if path else ", ".join(names))


def _row(name: str, field: FieldInfo, schema: dict[str, Any], inner: type[BaseModel] | None) -> str:
    if inner is None:
        kind = _kind(schema)
    else:
        keys = ", ".join(f"`{key}`" for key in inner.model_fields)
        kind = f"mapping of {keys}" if inner is field.annotation else f"list of mappings, keys below under {name}"
    default = "required" if field.is_required() else f"`{json.dumps(_default(field), ensure_ascii=False)}`"
    cells = [f"`{name}`", kind, default, schema.get("description", "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return value.model_dump() if isinstance(value, BaseModel) else value


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field is, or holds a list of."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None


_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"{len(schema['prefixItems'])} numbers"
        case "array":
            return f"list of {_kind(schema['items'])}" + (", at least one" if schema.get("minItems") else "")
        case "object":
            inner = schema.get("additionalProperties")
            return f"mapping of names to {_kind(inner)}" if isinstance(inner, dict) else "mapping"
        case kind:
            step = f", a multiple of {schema['multipleOf']}" if "multipleOf" in schema else ""
            return _WORDS[str(kind)] + step


if __name__ == "__main__":
    print(render_reference(), end="")
