"""A run folder with a tiny target, a draft fitted to half of its held-out prompts, and all that a benchmark reads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.files import digest_file, write_json
from eyas.manifest import Counts, Manifest
from eyas.sglang.client import SGLangClient
from eyas.sglang.identity import FINGERPRINT_NAME, prove_same_target
from eyas.target.rendering import Renderer
from eyas.target.spec import load_target
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder
from tests.speculate.test_benchmark import write_export_manifests
from tests.speculate.test_embedded import CAP, PROMPTS, K, fit_draft, save_target


def fitted_run(model: Any, root: Path, **benchmark: Any) -> tuple[RunFolder, RunConfig]:
    """`benchmark` changes settings of phase 6; the config lies in `run.json`, from which another process may read it."""
    run = RunFolder(root / "run").create()
    target = root / "target"
    target.mkdir()
    spec = save_target(model, target)
    run.export.mkdir(parents=True)
    fit_draft(model, spec, run.export)
    write_export_manifests(run, target)
    run.prompts("b1").mkdir(parents=True)
    rows = [{"id": f"{number:032x}", "split": "heldout", "input_ids": prompt.input_ids} for number, prompt in enumerate(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), run.prompts("b1") / "prompts.parquet")
    run.merged.mkdir()
    record = {"id": "00", "split": "train", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    pq.write_table(pa.Table.from_pylist([record]), run.merged / "tokens.parquet")
    for folder, stage in ((run.prompts("b1"), "prompts"), (run.merged, "merge")):
        print_ = digest_file(next(folder.glob("*.parquet")))
        figures = {"length_quantiles": {"p100": 30}}
        Manifest(stage=stage, stage_version=1, fingerprint=print_, counts=Counts.of(done=1), figures=figures).write(folder)
    settings = {"sets": ["heldout"], "num_draft_tokens": K, "max_new_tokens": CAP, "timed_prompts": 2, "dtype": "float32"}
    config = RunConfig.model_validate(
        {
            "target": {"model": str(target)},
            "prompts": {"datasets": [{"name": "b1", "source": "file:unused"}]},
            "server": {"engine": {"threads": 1, "dtype": "float32"}},
            "benchmark": settings | {"counting_concurrency": 4} | benchmark,
        }
    )
    write_json(run.run_json, {"config": config.model_dump(mode="json")})
    return run, config


def keep_fingerprint(run: RunFolder, config: RunConfig, url: str) -> None:
    """What generation leaves of its server at `url`."""
    spec = load_target(config.target)
    renderer = Renderer(spec, load_tokenizer(spec), config.target)

    async def take() -> None:
        async with SGLangClient(url, config.server) as client:
            await prove_same_target(client, renderer, run.root / FINGERPRINT_NAME)

    asyncio.run(take())
