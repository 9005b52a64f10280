"""A library made of paper: the phases' real signatures and manifests over a few bytes, to test orchestration alone.

Each function writes its folder the way the real ones do (files, then the manifest; nothing if a finished
manifest fits), and counts in `calls` how often a body really made something.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig, parse_config
from eyas.errors import ServerError
from eyas.files import write_bytes
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest
from eyas.progress import Progress
from eyas.workspace import RunFolder

DATASETS = ("B1_glaive", "B2_code")


class Paper:
    """What the stand-ins did, and what they are told to do next."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.failures: dict[str, int] = {}
        self.sessions = 0
        self.loops: set[int] = set()
        self.holds: dict[str, asyncio.Event] = {}  # datasets that generate until told

    def make(self, stage: str, folder: Path, name: str, inputs: dict[str, str], config: Any, text: str) -> Manifest:
        wanted = fingerprint(stage, 1, inputs=inputs, config=config.model_dump(mode="json"))
        if (manifest := finished_manifest(folder, wanted)) is not None:
            return manifest
        piece = f"{stage} {name}".strip()
        if self.failures.get(piece, 0) > 0:
            self.failures[piece] -= 1
            raise ServerError(f"{piece}: told to fail")
        self.made[piece] += 1
        write_bytes(folder / "data.txt", text.encode())
        return Manifest(
            stage=stage,
            stage_version=1,
            name=name,
            fingerprint=wanted,
            counts=Counts.of(done=2),
            files=file_entries(folder, ["data.txt"]),
        ).write(folder)


def config_with(**sections: Any) -> RunConfig:
    """A config with two paper datasets."""
    datasets = [{"name": name, "source": f"file:{name}.jsonl"} for name in DATASETS]
    return parse_config({"prompts": {"datasets": datasets}, **sections}, where="test")


def install(paper: Paper, patch: pytest.MonkeyPatch) -> None:
    """Put the paper library in place of the phases' modules."""

    def prepare_candidates(run: RunFolder, config: RunConfig, dataset: str, report: Any) -> Path:
        folder = run.root / "candidates" / dataset
        paper.make("candidates", folder, dataset, {}, config.prompts, dataset)
        return folder

    def select_prompts(run: RunFolder, config: RunConfig, report: Any) -> dict[str, Manifest]:
        return {
            dataset.name: paper.make(
                "prepare",
                run.prompts(dataset.name),
                dataset.name,
                {"target": config.target.model_dump_json()},
                config.prompts,
                "rows",
            )
            for dataset in config.prompts.datasets
        }

    class GenerationSession:
        def __init__(self, run: RunFolder, config: RunConfig, *, urls: list[str], api_key: str = "", report: Any, say: Any) -> None:
            self.run, self.config, self.report = run, config, report

        async def __aenter__(self) -> GenerationSession:
            paper.sessions += 1
            return self

        async def __aexit__(self, *details: object) -> None: ...

        async def generate_dataset(self, name: str) -> Manifest:
            paper.loops.add(id(asyncio.get_running_loop()))
            self.report(Progress(stage="generate", name=name, done=1, total=2, unit="responses", figures={"rate": 3.5}))
            if name in paper.holds:
                await paper.holds[name].wait()
            prompts = load_manifest(self.run.prompts(name))
            inputs = {"prompts": prompts.digest()}
            return paper.make("generate", self.run.responses(name), name, inputs, self.config.generation, name)

    def merge(run: RunFolder, config: RunConfig, report: Any) -> Manifest:
        return paper.make("merge", run.merged, "", _inputs(run, "responses"), config.merging, "merged")

    def plan_shards(run: RunFolder, config: RunConfig, dataset: str) -> list[str]:
        return [dataset]

    def extract_shard(run: RunFolder, config: RunConfig, plan: str, report: Any) -> None:
        paper.make("extract", run.hidden / plan, plan, {"responses": _digest(run.responses(plan))}, config.hidden, plan)

    def finish_extraction(run: RunFolder, config: RunConfig) -> Manifest:
        return paper.make("hidden", run.hidden, "", _inputs(run, "hidden"), config.hidden, "index")

    def export_draft(run: RunFolder, config: RunConfig) -> Manifest:
        return paper.make("export", run.export, "", {"draft": _digest(run.draft)}, config.draft, "export")

    def benchmark(run: RunFolder, config: RunConfig, report: Any, api_key: str, serve: Any) -> Manifest:
        return paper.make("benchmark", run.benchmark, "", {"export": _digest(run.export)}, config.benchmark, "results")

    async def train(command: list[str], **options: Any) -> None:
        run = RunFolder(Path(command[-1]))
        paper.make("train", run.draft, "", {"hidden": _digest(run.hidden)}, config_with().draft, "weights")

    class Host:
        @contextmanager
        def serving(self, mode: str, draft: Path | None = None) -> Any:
            yield ["http://127.0.0.1:1"]

    modules: dict[str, dict[str, Any]] = {
        "eyas.prompts.prepare": {"prepare_candidates": prepare_candidates, "select_prompts": select_prompts},
        "eyas.generation.session": {"GenerationSession": GenerationSession},
        "eyas.merging.merge": {"merge": merge},
        "eyas.hidden.extract": {
            "plan_shards": plan_shards, "extract_shard": extract_shard, "finish_extraction": finish_extraction,
        },
        "eyas.draft.export": {"export_draft": export_draft},
        "eyas.speculate.benchmark": {"benchmark": benchmark},
    }  # fmt: skip
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        patch.setitem(sys.modules, name, module)
    patch.setattr("tasks.train.run_child", train)
    patch.setattr("tasks.generate._finished", lambda run, config, dataset: None)  # the paper session looks itself
    patch.setattr("flows.runs.preflight", lambda root, config, api_key: None)  # the paper's sources and target are nowhere
    patch.setattr("flows.phases.host_of", lambda *positional, **named: Host())


def _inputs(run: RunFolder, folder: str) -> dict[str, str]:
    return {name: _digest(run.root / folder / name) for name in DATASETS}


def _digest(folder: Path) -> str:
    return load_manifest(folder).digest()
