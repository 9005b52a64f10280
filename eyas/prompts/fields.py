"""Field mapping of a dataset: the names that converters want, taken from a row's own fields."""

from __future__ import annotations

from typing import Any

from eyas.errors import ConfigError, RecordError
from eyas.prompts.config import DatasetConfig
from eyas.prompts.converters import refuse_media

_HEAD_ROWS = 100
_ABSENT = object()


class FieldMapping:
    """Applies `fields` (wanted name to the row's name, dots go into objects) and notices names that no row has."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self._dataset = dataset
        self._unseen = dict(dataset.fields)
        self._num_rows = 0
        self._keys: set[str] = set()

    def apply(self, value: Any) -> Any:
        """The row with the wanted names added; raises `ConfigError` after 100 rows without one of the fields."""
        if not self._dataset.fields or not isinstance(value, dict):
            return value
        self._num_rows += 1
        self._keys.update(key for key in list(value)[:20] if isinstance(key, str))
        mapped: dict[str, Any] = {}
        missing = ""
        for wanted, name in self._dataset.fields.items():
            found = _lookup(value, name)
            if found is _ABSENT:
                missing = name
            else:
                mapped[wanted] = found
                self._unseen.pop(wanted, None)
        if self._num_rows == _HEAD_ROWS:
            self.check_seen()
        if missing:
            raise RecordError("missing_field", f"field {missing!r} is not in the row")
        refuse_media(value, "the row")  # what is asked about a picture is no prompt without it
        return mapped

    def check_seen(self) -> None:
        """Raise `ConfigError` if a mapped field was in no row so far."""
        if self._unseen and self._num_rows:
            wanted, name = next(iter(self._unseen.items()))
            raise ConfigError(
                f"dataset {self._dataset.name}: fields.{wanted} names {name!r}, which none of {self._num_rows} rows has; "
                f"they have {', '.join(sorted(self._keys)[:12])}; correct prompts.datasets"
            )


def _lookup(value: dict[str, Any], name: str) -> Any:
    if name in value:
        return value[name]
    node: Any = value
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node
