"""The codec probe on a small trained draft, its verdicts, and what the plan offers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config import RunConfig
from eyas.draft.baseline import make_draft, replay_records
from eyas.draft.corpus import Corpus
from eyas.draft.export import export_draft, load_export
from eyas.draft.train import train
from eyas.files import write_json
from eyas.operate import codec_probe
from eyas.operate.codec_result import passed, read_codecs
from eyas.operate.plan import PlanKeeper, render_plan
from eyas.target.precision import native_dtype
from eyas.target.spec import load_target
from eyas.target.weights import load_head
from eyas.workspace import RunFolder
from tests.draft.runs import learnable_records, run_config, write_run, write_target


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunConfig]:
    root = tmp_path_factory.mktemp("codecs")
    target = write_target(root / "target")
    run = write_run(root / "run", target, learnable_records(30), learnable_records(6, 1))
    config = run_config(target, max_steps=30)
    train(run, config)
    export_draft(run, config)
    return run, config


def test_the_runs_draft_is_replayed_on_decoded_states(
    trained: tuple[RunFolder, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = trained
    monkeypatch.setattr(codec_probe, "RECORDS", 36)
    result = codec_probe.measure(run, run, config)
    head, (spec, tensors) = load_head(load_target(config.target), torch.float32), load_export(run.export)
    draft = make_draft(spec, tensors, head.embed_tokens.to(getattr(torch, native_dtype())))
    corpus = Corpus.open(run)
    wanted = replay_records(draft, tensors["d2t"], head, corpus, [*corpus.train, *corpus.heldout], config).overall
    assert result["draft"] == "draft/export"
    for row in result["codecs"].values():
        assert row["replay"]["exact"] == pytest.approx(wanted.accept_length, abs=1e-4)
        assert row["replay"]["verifications"] == wanted.verifications
        assert wanted.accept_length > 2, "a draft that is never right would not feel a codec"
    assert list(passed(result)) == ["fp8"]
    assert [row["faults"][0].split()[0] for row in result["codecs"].values() if row["faults"]] == ["accept", "accept"], (
        "channels of noise have nothing to spare for 4 bits"
    )
    assert result["codecs"]["int4_top"]["kept_mass"] == pytest.approx(1, abs=0.01), "48 draft tokens, 64 kept"


def test_states_that_come_back_wrong_pass_nowhere(trained: tuple[RunFolder, RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = trained
    monkeypatch.setattr(codec_probe, "RECORDS", 36)
    decode = codec_probe.decode
    monkeypatch.setattr(codec_probe, "decode", lambda *given: decode(*given).roll(1, -1))
    result = codec_probe.measure(run, run, config)
    assert not passed(result)
    assert [text.split()[0] for text in result["codecs"]["int4"]["faults"]] == ["states", "the", "accept"]


def row(**changes: Any) -> dict[str, Any]:
    figures = {"bytes_per_token": 1589, "share_of_bf16": 0.344, "aux_error": [0.1, 0.1, 0.1], "agreement": 0.985, "ties": 0.01}
    return {**figures, "kept_mass": None, "replay": None, **changes}


@pytest.mark.parametrize(
    ("changes", "records", "faults"),
    [
        ({}, 200, []),
        ({}, 199, ["199 of 200 replies"]),
        ({"ties": 0.0}, 200, ["the target's token at 98.50%, wanted 99%"]),
        ({"aux_error": [0.1, 0.151, 0.1]}, 200, ["states off by 15.1%, at most 15%"]),
        ({"replay": {"change": -0.0101}}, 200, ["accept length -1.0%, at most 1% either way"]),
        ({"replay": {"change": -0.0099}}, 200, []),
    ],
)
def test_a_codec_passes_by_each_of_its_bars(changes: dict[str, Any], records: int, faults: list[str]) -> None:
    assert codec_probe._faults(row(**changes), 0.99, records) == faults


def test_the_change_is_paired_and_pooled() -> None:
    exact = [(10, 10), (30, 60)]
    change = codec_probe._change([(10, 10), (36, 54)], exact)
    assert (change["exact"], change["decoded"]) == (2.75, 2.3913)  # 1 + 70 / 40, 1 + 64 / 46
    assert change["interval_95"][0] < change["change"] < 0
    assert codec_probe._change(exact, exact)["interval_95"] == [0.0, 0.0]


def test_the_plan_offers_what_passed_and_only_that(run: RunFolder, config: RunConfig) -> None:
    def offered() -> list[str]:
        return [item["set"] for item in keeper.refresh()["alternatives"] if "codec" in item["set"]]

    keeper = PlanKeeper(run, config)
    assert offered() == [], "exact states, until the target's own probe says more"
    replayed = {"exact": 1.62, "decoded": 1.61, "change": -0.0081, "interval_95": [-0.012, -0.004], "verifications": 900}
    codecs = {"fp8": row(replay=replayed) | {"faults": []}, "int4": row() | {"faults": ["12 of 200 replies"]}}
    result = {"target": load_target(config.target).fingerprint, "records": 200, "tokens": 9000, "draft": "draft/export"}
    write_json(run.hidden / "codecs.json", {**result, "codecs": codecs})
    assert offered() == ["hidden.codec=fp8"]
    text = render_plan(keeper.refresh())
    assert "| hidden states in fp8: accept length -0.8% (95 %: -1.2% to -0.4%) | `hidden.codec=fp8` |" in text
    assert "12 of 200 replies |" in text
    write_json(run.hidden / "codecs.json", {**result, "codecs": codecs, "target": "another"})
    assert offered() == []


def test_a_damaged_result_offers_nothing(run: RunFolder) -> None:
    for text in ('{"codecs": {', '{"target": "x", "codecs": {"int4": {}}}', "[]"):
        Path(run.hidden).mkdir(exist_ok=True)
        (run.hidden / "codecs.json").write_text(text)
        assert read_codecs(run, "x") is None
