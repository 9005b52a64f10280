"""Phases 1 and 4 over a real Ray through prefect-ray: the same bytes as in one process, from several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from eyas.config import RunConfig
from eyas.hidden.extract import extract as extract_here
from eyas.merging.merge import merge
from eyas.operate.pipeline import open_run
from eyas.prompts.prepare import prepare as prepare_here
from eyas.workspace import RunFolder
from flows.extract import extract
from flows.pipeline import pipeline
from tests.hidden.tiny import TinyRun, build_weights
from tests.prefect.test_pipeline import sections
from tests.prefect_e2e.conftest import Stack
from tests.sglang.tiny import build_target, tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

RAY = {"operate": {"runner": {"kind": "ray"}}}


@pytest.fixture(autouse=True)
def server(stack: Stack) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: f"{stack.ui}/api"}):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_weights(build_target(tmp_path_factory.mktemp("target")))


def files_of(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob(pattern))}


async def test_shards_are_extracted_on_ray_side_by_side_with_the_bytes_of_this_process(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()  # the source that the tiny run's config names, which a flow looks for before it begins
    shards = {"shard_bytes": 1 << 20, "disk_reserve_bytes": 0, "probe_records": 4, "threads": 1}
    folders: dict[str, RunFolder] = {}
    for name, extra in (("here", {}), ("ray", RAY)):
        tiny = TinyRun(tmp_path / name, target)
        for dataset in ("a", "b"):
            tiny.write_greedy(dataset, 6)
        config: RunConfig = tiny.config("a", "b", hidden=shards, **extra)
        folders[name] = open_run(tiny.run.root, config)
        merge(tiny.run, config)
        if name == "here":
            extract_here(tiny.run, config)
        else:
            assert (await extract(run=str(tiny.run.root), return_state=True)).is_completed()
    assert files_of(folders["ray"].hidden, "shard-*.safetensors") == files_of(folders["here"].hidden, "shard-*.safetensors")
    progress = json.loads((folders["ray"].progress / "extract-a.json").read_bytes())
    assert progress["pid"] != os.getpid(), "another process did the work"


async def test_datasets_are_prepared_on_ray_with_the_bytes_of_this_process(tmp_path: Path, target: Path) -> None:
    rows: dict[str, Any] = {}
    for dataset in ("a", "b"):
        path = tmp_path / f"{dataset}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{dataset}: how much is {n} and {n}?"}) + "\n" for n in range(20)))
        rows[dataset] = {"name": dataset, "source": f"file:{path}", "max_new_tokens": 20}
    prompts = {"datasets": list(rows.values()), "decontaminate_against": []}
    config = tiny_config(target, {"a": 20, "b": 20})
    config = RunConfig.model_validate(config.model_dump() | {"prompts": prompts} | RAY)
    here = RunFolder(tmp_path / "here")
    prepare_here(here, config)
    state = await pipeline(run=str(tmp_path / "ray"), **sections(config), until="prepare", return_state=True)
    assert state.is_completed(), state
    assert files_of(tmp_path / "ray", "prompts/*/prompts.parquet") == files_of(here.root, "prompts/*/prompts.parquet")
