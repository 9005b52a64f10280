"""The base of every config model: unknown keys are refused, values are frozen and finite, defaults are checked.

A form shows a field's description and not its bounds, so the schema's descriptions say them; a label spells out the
unit that a name abbreviates; and the schema is kept in PostgreSQL, which sorts keys by length, so each property says
its place. A field that may be left to the target takes a value that says so ("auto", -1): a form shows `X | None` as
a toggle of types.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def server_url(url: str) -> str:
    """`url`, if it is the base address of a server; raises `ValueError` otherwise."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_usable = False
    if not is_usable or any(character.isspace() for character in url) or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no URL of a server, such as http://127.0.0.1:30000")
    return url


ServerUrl = Annotated[str, AfterValidator(server_url)]
"""Base URL of a server: http or https, a host, a port if it is not the usual one."""


def fit_for_a_form(schema: dict[str, Any]) -> None:
    """Say each property's numeric bounds at the end of its description, its unit in its title, and its place (`position`)."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position  # Prefect's UI sorts by it
        if "title" in field:
            field["title"] = field["title"].replace(" Per S", " Per Second").replace(" Bytes", " (bytes)")
            field["title"] = re.sub(r" S$", " (seconds)", field["title"])
        said = [f"{words} {field[name]:,}" for name, words in _BOUNDS.items() if name in field]
        if said:
            text = " and ".join(said)
            field["description"] = f"{field.get('description', '')} {text[0].upper()}{text[1:]}.".strip()


class Settings(BaseModel):
    """Base of the config tree; each stage owns its own subclass beside the code that reads it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, json_schema_extra=fit_for_a_form
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads a bare yes, on or true as a boolean, which would count as 1; above 2**63 arrays and clocks overflow."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("wanted a number")
        if isinstance(value, (int, float)) and abs(value) >= 2**63:
            raise ValueError("wanted a number below 2**63")
        return value
