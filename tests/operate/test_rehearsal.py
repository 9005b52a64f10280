"""The rehearsal: later phases really run on the first replies of a journal that is still being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from eyas.config import RunConfig
from eyas.draft import curve
from eyas.errors import ArtifactError, EyasError
from eyas.files import read_json
from eyas.generation.records import journal_line
from eyas.hidden.store.codecs import decode, encode
from eyas.manifest import load_manifest
from eyas.operate import codec_probe, learning_curve
from eyas.operate.pipeline import open_run
from eyas.operate.rehearsal import first_replies, rehearse
from eyas.workspace import RunFolder
from tests.generation.conftest import tokenized_rows
from tests.hidden.tiny import build_weights, greedy, load_plain, plain_states
from tests.sglang.tiny import build_target, tiny_config, write_prompts

SECTIONS: dict[str, dict[str, Any]] = {
    "merging": {"draft_vocab_size": 64},
    "hidden": {"disk_reserve_bytes": 0, "threads": 1, "dtype": "float32"},
    "draft": {"batch_tokens": 64, "num_unroll_steps": 2, "threads": 1, "dtype": "float32"},
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_weights(build_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def config(weights: Path) -> RunConfig:
    return tiny_config(weights, {"a": 20, "b": 20, "c": 20}, **SECTIONS)


@pytest.fixture
def run(tmp_path: Path, weights: Path, config: RunConfig) -> RunFolder:
    """Three datasets prepared, two of them with journals: twelve replies and a reject, and a line that is not yet whole."""
    run = open_run(tmp_path / "run", config)
    for dataset in ("a", "b", "c"):
        rows = write_prompts(run, config, dataset, 20)
        if dataset == "c":
            continue
        run.responses(dataset).mkdir(parents=True)
        lines = [journal_line({"id": rows[0]["id"], "reject": "no_room", "detail": "", "seed": 1})]
        for row in np.random.default_rng(0).permutation(np.array(rows[1:13], dtype=object)):
            ids = greedy(weights, row["input_ids"], 12)[len(row["input_ids"]) :]
            spans = {"reasoning": None, "answer": [len(row["input_ids"]), len(row["input_ids"]) + 12], "tool_calls": None}
            entry = {"id": row["id"], "output_ids": ids, "prompt_tokens": len(row["input_ids"]), "finish_reason": "length"}
            lines.append(journal_line({**entry, "spans": spans, "seed": 1}))
        torn = lines[-1][:20]
        (run.responses(dataset) / "journal-000000000000.jsonl").write_bytes(b"".join([*lines, torn]))
    return run


def test_the_phases_after_generation_go_through_on_the_first_replies(run: RunFolder, config: RunConfig) -> None:
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    result = rehearse(run, config, records=24)
    assert result["records"] == {"a": 8, "b": 8}
    assert set(result["seconds"]) == {"merge", "extract", "train", "export"}
    assert result["export_bytes"] > 10_000
    assert read_json(run.root / "rehearsal.json") == result
    after = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file() and path.name != "rehearsal.json"}
    assert after == before, "the run itself is as it was"


def test_what_would_fail_after_generation_fails_now(run: RunFolder, config: RunConfig, weights: Path) -> None:
    broken = config.model_copy(update={"draft": config.draft.model_copy(update={"num_kv_heads": 3})})
    with pytest.raises(EyasError, match="num_kv_heads"):
        rehearse(run, broken, records=24)
    assert not (run.root / "rehearsal.json").exists()


def test_the_replies_are_the_journals_own_and_some_are_held_out(run: RunFolder, config: RunConfig, tmp_path: Path) -> None:
    small = RunFolder(tmp_path / "small")
    assert first_replies(run, config, small, wanted=dict.fromkeys("abc", 3), holds_out=True) == {"a": 3, "b": 3}
    for dataset in ("a", "b"):
        wanted = {entry["id"]: entry for entry in journaled(run, dataset)}
        rows = tokenized_rows(small, dataset)
        assert sorted(row["split"] for row in rows) == ["heldout", "train", "train"]
        assert all(row["input_ids"][row["prompt_tokens"] :] == wanted[row["id"]]["output_ids"] for row in rows)


def test_without_a_reply_there_is_nothing_to_rehearse(run: RunFolder, config: RunConfig, tmp_path: Path) -> None:
    for path in run.root.glob("responses/*/journal-*.jsonl"):
        path.unlink()
    with pytest.raises(ArtifactError, match="no accepted reply yet"):
        first_replies(run, config, RunFolder(tmp_path / "small"), wanted=dict.fromkeys("abc", 3), holds_out=True)


def test_the_learning_curve_of_a_run_that_generates_is_that_of_its_first_replies(
    run: RunFolder, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_child(arguments: list[str], **others: Any) -> None:
        assert curve.main(arguments[2:]) == 0

    monkeypatch.setattr(learning_curve, "in_child", in_child)  # spares seconds of imports
    monkeypatch.setattr(curve, "stop_signals", list)
    for dataset in ("a", "b", "c"):
        manifest = load_manifest(run.prompts(dataset))
        figures = {**manifest.figures, "splits": {"train": 16, "heldout": 4}}
        manifest.model_copy(update={"figures": figures}).write(run.prompts(dataset))
    assert learning_curve.needed_replies(run, config) == 60
    before = {path for path in run.root.rglob("*") if path.is_file()}
    result = learning_curve.learning_curve(run, config)
    assert (result["total_records"], result["source"]) == (48, "first replies")
    assert 2 <= result["points"][-1]["records"] < 24, "held-out replies among them stay held out"
    left = {path.name for path in run.root.rglob("*") if path.is_file()} - {path.name for path in before}
    assert left == {"learning-curve.json", ".learning-curve.lock"}, "nothing else stays"


def test_codecs_are_probed_on_the_first_replies_as_the_target_itself_says(
    run: RunFolder, config: RunConfig, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_probe, "RECORDS", 24)
    before = {path for path in run.root.rglob("*") if path.is_file()}
    result = codec_probe.probe_codecs(run, config)
    assert (result["records"], result["draft"]) == (16, None), "8 of each dataset that has replies; the third has none yet"
    assert list(result["codecs"]) == ["fp8", "int4"], "top-k probabilities need the merge"
    same, errors = 0, []
    for dataset in ("a", "b"):
        rows = [entry for entry in journaled(run, dataset) if "output_ids" in entry][:8]
        prompts = {row["id"]: row for row in prompt_rows(run, dataset)}
        states = [plain_states(weights, [*prompts[row["id"]]["input_ids"], *row["output_ids"]]) for row in rows]
        aux, final = (torch.cat(part).bfloat16() for part in zip(*states, strict=True))
        decoded = decode("aux", encode("aux", aux, "int4"), slice(None), "int4").float()
        rms = aux.float().square().mean(0).sqrt()
        errors.append(((decoded - aux.float()) / rms).square().mean(0)[:32].mean())
        coded = decode("final", encode("final", final, "fp8"), slice(None), "fp8")
        head = load_plain(weights).lm_head.weight
        first = 0
        for own, _ in states:
            part = slice(first + len(own) - 13, first + len(own) - 1)  # the rows before its twelve generated tokens
            same += int(((coded[part].float() @ head.T).argmax(-1) == (final[part].float() @ head.T).argmax(-1)).sum())
            first += len(own)
    int4 = result["codecs"]["int4"]
    assert int4["agreement"] == pytest.approx(same / (16 * 12), abs=1e-4)
    assert int4["aux_error"][0] == pytest.approx(float(torch.stack(errors).mean().sqrt()), rel=0.01)
    assert int4["faults"][0] == "16 of 24 replies"
    assert read_json(run.hidden / "codecs.json") == result
    left = {path.name for path in run.root.rglob("*") if path.is_file()} - {path.name for path in before}
    assert left == {"codecs.json", ".codec-probe.lock"}, "nothing else stays"


def prompt_rows(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run.prompts(dataset) / "prompts.parquet", columns=["id", "input_ids"]).to_pylist()
    return rows


def journaled(run: RunFolder, dataset: str) -> list[dict[str, Any]]:
    lines = (run.responses(dataset) / "journal-000000000000.jsonl").read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]
