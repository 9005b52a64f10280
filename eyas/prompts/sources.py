"""Where a dataset's rows come from: files and folders, a hub, or data inside an installed package.

A source knows its identity (what a fingerprint needs) and yields rows with their place. Nothing of a
source is held in memory, nothing of a package is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError, EyasError, ServerError
from eyas.files import digest_file
from eyas.prompts.config import DatasetConfig
from eyas.prompts.packages import open_package_source
from eyas.prompts.readers import Row, is_readable, read_rows


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one dataset; `identity` changes whenever the rows may."""

    identity: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    converter: str = "auto"
    license: str = ""


def open_source(dataset: DatasetConfig, *, max_row_bytes: int) -> Source:
    """The source that a dataset's config names; raises `ConfigError` where it is unknown or missing."""
    kind, separator, name = dataset.source.partition(":")
    if not separator or not name or kind not in ("file", "hub", "package"):
        raise ConfigError(
            f"dataset {dataset.name}: source is {dataset.source!r}, wanted file:PATH, hub:ID or package:NAME; "
            "correct it in prompts.datasets"
        )
    if kind == "file":
        return _file_source(dataset, Path(os.path.expanduser(name)), max_row_bytes)
    if kind == "hub":
        return _hub_source(dataset, name)
    package = open_package_source(name, max_row_bytes=max_row_bytes)
    return Source(identity=package.identity, rows=package.rows, converter=package.converter, license=package.license)


def _file_source(dataset: DatasetConfig, path: Path, max_row_bytes: int) -> Source:
    if path.is_dir():
        found = sorted(item for item in path.rglob("*") if item.is_file())
        hidden = [any(part.startswith(".") for part in item.relative_to(path).parts) for item in found]
        files = [item for item, is_hidden in zip(found, hidden, strict=True) if is_readable(item) and not is_hidden]
        names = [_as_text(item.relative_to(path)) for item in files]
    else:
        files, names = [path], [_as_text(Path(path.name))]
    if not files or not all(item.is_file() and is_readable(item) for item in files):
        raise ConfigError(
            f"dataset {dataset.name}: {path} is no file or folder of JSONL, JSON, Parquet or CSV "
            "(plain, .gz, .bz2, .xz or .zst); correct its source"
        )

    def rows() -> Iterator[Row]:
        for item, name in zip(files, names, strict=True):
            yield from read_rows(item, name=name, max_row_bytes=max_row_bytes, fields=dataset.fields.values())

    digests = {name: digest_file(item) for item, name in zip(files, names, strict=True)}
    return Source(identity={"kind": "file", "files": digests}, rows=rows)


def _as_text(path: Path) -> str:
    """A path as text that UTF-8 can hold, other for every path: bytes that are no UTF-8 are written as \\xNN."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def check_hub(name: str) -> None:
    """Raise `ConfigError` where the `datasets` library is told to stay offline and what `hub:` names is no folder here."""
    from datasets import config as library

    if library.HF_HUB_OFFLINE and not Path(name).is_dir():
        raise ConfigError(
            f"hub:{name} cannot be fetched: HF_HUB_OFFLINE (or HF_DATASETS_OFFLINE) is set; unset it, or download the set where "
            "there is a network and give file:PATH"
        )


def _hub_source(dataset: DatasetConfig, name: str) -> Source:
    def rows() -> Iterator[Row]:
        from datasets import load_dataset

        check_hub(name)
        number = 0
        try:
            stream = load_dataset(
                name, dataset.subset or None, split=dataset.split, revision=dataset.revision or None, streaming=True
            )
            for value in stream:
                number += 1
                yield Row(where=f"{name}/{dataset.split}:{number}", value=value)
        except EyasError:
            raise
        except (ConnectionError, TimeoutError) as error:
            raise ServerError(
                f"dataset {dataset.name}: hub:{name} broke off after row {number}: {error}; check the network, or download it "
                "and give file:PATH"
            ) from error
        except Exception as error:  # the datasets library raises many kinds; all mean that this source cannot be read
            raise ConfigError(
                f"dataset {dataset.name}: hub source {name!r} (subset {dataset.subset!r}, split {dataset.split!r}) cannot be read "
                f"after row {number}: {error}; check its name and the network, or download it and give file:PATH"
            ) from error

    identity = {"kind": "hub", "id": name, "subset": dataset.subset, "split": dataset.split, "revision": dataset.revision}
    return Source(identity=identity, rows=rows)
