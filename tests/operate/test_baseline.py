"""The draft to beat: served and measured before generation, on a run that has prompts and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.config import RunConfig
from eyas.draft.baseline import import_baseline
from eyas.files import read_json, write_json
from eyas.manifest import verify_manifest
from eyas.operate import hosts, pipeline
from eyas.operate.baseline import baseline_said, benchmark_baseline
from eyas.operate.plan import render_plan
from eyas.operate.report import write_report
from eyas.target.spec import load_target
from eyas.workspace import RunFolder
from tests.speculate.conftest import FakeEngine, served, tiny_target
from tests.speculate.test_benchmark import write_draft, write_manifest


class TwoServers:
    """A host that has one server for each side."""

    def __init__(self, off: str, on: str) -> None:
        self.urls, self.drafts = (off, on), set[Path]()

    @contextmanager
    def serving(self, mode: str, *, draft: hosts.Draft | None = None, alone: bool = False) -> Iterator[list[str]]:
        assert mode == ("draft" if draft else "generate")
        if draft:
            self.drafts.add(draft.folder)
        yield [self.urls[draft is not None]]


def prepared(tmp_path: Path) -> tuple[RunFolder, RunConfig, Any]:
    """Prompts, another's draft, and a config that names it and a host with commands."""
    model = tiny_target()
    target = tmp_path / "target"
    model.save_pretrained(target)
    theirs, run = RunFolder(tmp_path / "theirs"), RunFolder(tmp_path / "run").create()
    write_draft(theirs, target)
    run.prompts("b1").mkdir(parents=True)
    rows = [
        {"id": f"{row}", "split": "heldout" if row % 2 else "train", "input_ids": [3 + 9 * row, 4, 5 + row]} for row in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), run.prompts("b1") / "prompts.parquet")
    write_manifest(run.prompts("b1"), "prompts")
    commands = dict.fromkeys(("generate", "none", "draft"), "true")
    config = RunConfig.model_validate(
        {
            "target": {"model": str(target)},
            "prompts": {"datasets": [{"name": "b1", "source": "file:unused"}]},
            "server": {"kind": "sglang", "urls": ["http://127.0.0.1:1"]},
            "draft": {"baseline": str(theirs.export)},
            "benchmark": {
                "prompts_per_set": 3,
                "max_new_tokens": 12,
                "timed_prompts": 2,
                "sets": ["heldout"],
                "counting_concurrency": 8,
            },
            "operate": {"host": {"kind": "command", "commands": commands}},
        }
    )
    import_baseline(run, config, load_target(config.target))
    return run, config, model


def test_it_is_served_before_there_is_a_reply_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config, model = prepared(tmp_path)
    off, on = FakeEngine(model), FakeEngine(model, accepted=1)
    draft = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(run.baseline), "speculative_num_steps": 3}
    on.info = draft | {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    with served(off) as off_url, served(on) as on_url:
        host = TwoServers(off_url, on_url)
        monkeypatch.setattr(hosts, "host_of", lambda *_, **__: host)
        manifest = benchmark_baseline(run, config, say=print)
        asked = len(on.requests)
        assert benchmark_baseline(run, config, say=print) == manifest
    assert asked == len(on.requests) > 0, "an unchanged one is not measured again"
    assert host.drafts == {run.baseline.resolve()}
    assert verify_manifest(run.baseline / "benchmark") == manifest
    results = read_json(run.baseline / "benchmark" / "results.json")
    assert results["accept_length"]["overall"] == pytest.approx(2.0)
    assert set(results["baselines"]) == {"prompt_lookup"}, "no training data, no bigrams"
    assert not run.benchmark.exists()
    assert not run.merged.exists()
    assert "accept length 2.000" in baseline_said(run)


def test_where_only_a_person_could_serve_it_that_is_said(tmp_path: Path) -> None:
    run, config, _ = prepared(tmp_path)
    manual = config.operate.model_copy(update={"host": config.operate.host.model_copy(update={"kind": "manual"})})
    said: list[str] = []
    assert benchmark_baseline(run, config.model_copy(update={"operate": manual}), say=said.append) is None
    assert "no command for mode draft" in said[0]
    assert baseline_said(run) == ""


def test_the_pipeline_measures_it_before_the_decision(run: RunFolder, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(pipeline, "_STEPS", {name: lambda _, name=name: calls.append(name) for name in pipeline.PHASES})
    monkeypatch.setattr(pipeline, "benchmark_baseline", lambda *_, **__: calls.append("baseline"))
    monkeypatch.setattr(pipeline, "decide", lambda *_: calls.append("decide"))
    pipeline.run_pipeline(run, config, phases=["prepare", "generate", "merge"])
    assert calls == ["prepare", "baseline", "decide", "generate", "merge"]


def test_plan_and_report_say_what_was_gained(finished_run: RunFolder, config: RunConfig) -> None:
    ours = read_json(finished_run.benchmark / "results.json")
    accept = {"overall": 1.25, "interval_95": [1.2, 1.3], "num_verifications": 2_345}
    write_json(finished_run.baseline / "benchmark" / "results.json", {"accept_length": accept, "speedup": 1.1})
    plan = pipeline.PlanKeeper(finished_run, config).refresh()
    gained = f"{ours['accept_length']['overall'] - 1.25:+.3f} tokens per verification"
    for text in (render_plan(plan), *(path.read_text() for path in write_report(finished_run))):
        assert "accept length 1.250 (95 %: 1.200–1.300, 2,345 verifications), speed-up 1.10×" in text
        assert gained in text
