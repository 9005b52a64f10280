from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.manifest import Manifest
from eyas.prompts.prepare import prepare
from eyas.prompts.store import read_prompts
from eyas.workspace import RunFolder
from tests.target.tiny_target import CHATML, write_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", CHATML)


@pytest.fixture
def make_config(target: Path) -> Callable[..., RunConfig]:
    """A config over datasets given as (name, path or settings); nothing is decontaminated unless asked for."""

    def make(datasets: dict[str, Any], *, model: Path | None = None, **prompts: Any) -> RunConfig:
        listed = [
            {"name": name, **({"source": f"file:{value}"} if isinstance(value, (str, Path)) else value)}
            for name, value in datasets.items()
        ]
        settings = {"decontaminate_against": [], "reject_limit": 1.0, "heldout_share": 0.2, **prompts, "datasets": listed}
        return RunConfig.model_validate({"target": {"model": str(model or target)}, "prompts": settings})

    return make


@pytest.fixture
def prepared(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> Callable[..., tuple[Manifest, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Prepare rows as one dataset; returns its manifest, prompts and rejects."""

    def run(rows: list[Any] | Path, *, dataset: dict[str, Any] | None = None, **settings: Any):
        path = rows if isinstance(rows, Path) else write_rows(tmp_path / "rows.jsonl", rows)
        folder = RunFolder(tmp_path / "run")
        config = make_config({"B": {"source": f"file:{path}", **(dataset or {})}}, **settings)
        manifest = prepare(folder, config)["B"]
        return manifest, list(read_prompts(folder.prompts("B"))), read_rejects(folder, "B")

    return run


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON Lines, as json.dumps escapes them; bytes are written as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def read_rejects(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    data = (run.prompts(dataset) / "rejects.jsonl").read_bytes()
    return [json.loads(line) for line in data.split(b"\n") if line]


def chat(*turns: str, system: str = "") -> dict[str, Any]:
    """A ShareGPT row of alternating turns, the first one human's."""
    head = [{"from": "system", "value": system}] if system else []
    return {"conversations": head + [{"from": ("human", "gpt")[index % 2], "value": turn} for index, turn in enumerate(turns)]}
