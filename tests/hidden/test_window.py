"""Training within a disk budget: the same curve as with everything stored, never more bytes than allowed, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eyas.config import RunConfig
from eyas.draft.corpus import Corpus
from eyas.draft.train import main, train
from eyas.errors import ArtifactError, ConfigError
from eyas.hidden.extract import extract, extract_shard
from eyas.hidden.store.reader import HiddenStore, Record
from eyas.hidden.window import WindowedStore
from eyas.manifest import verify_manifest
from eyas.merging.merge import merge
from eyas.workspace import RunFolder
from tests.hidden.tiny import TinyRun

BUDGET = 400_000  # of about 0.7 MB of states
TIMES = ("seconds", "positions_per_s", "remaining_s", "step_s")


@pytest.fixture
def config(tiny: TinyRun) -> RunConfig:
    for name in ("a", "b"):
        tiny.write_random(name, 45)
    draft = {
        "threads": 1,
        "dtype": "float32",
        "epochs": 2,
        "batch_tokens": 100,
        "eval_every": 12,
        "eval_records": 8,
        "log_every": 1,
    }
    plain = tiny.hidden_config("a", "b", disk_budget=BUDGET)
    config = RunConfig.model_validate(plain.model_dump() | {"draft": plain.draft.model_dump() | draft})
    merge(tiny.run, config)
    extract(tiny.run, config)
    return config


def curve(run: RunFolder) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run.draft / "metrics.jsonl").read_bytes().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def window_bytes(run: RunFolder) -> int:
    """On disk, what is being written included; files may go while we look."""
    total = 0
    for path in run.hidden.glob("*shard-*.safetensors*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


class WholeStore(WindowedStore):
    """Everything extracted and kept, read as any whole store is, in the order of a window's epochs."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        super().__init__(run, config)
        for plan in self._plans.values():
            entry = extract_shard(run, config, plan)
            self._rows |= {item: (plan.name, row, entry.num_tokens[row]) for row, item in enumerate(entry.ids)}

    expect, record, _open = HiddenStore.expect, HiddenStore.record, HiddenStore._open  # type: ignore[assignment]


def test_a_window_gives_the_curve_of_a_whole_store_and_stays_within_its_bytes(
    tiny: TinyRun, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunFolder(tmp_path / "whole")
    shutil.copytree(tiny.run.root, whole.root)
    most = 0

    def watched(store: WindowedStore, record_id: str) -> Record:
        nonlocal most
        most = max(most, window_bytes(tiny.run))
        return read(store, record_id)

    monkeypatch.setattr("eyas.draft.trainer.SAMPLE_COLUMNS", 600)  # the start is solved from part of an epoch, then it begins anew
    read = WindowedStore.record
    with monkeypatch.context() as patch:
        patch.setattr(WindowedStore, "record", watched)
        manifest = train(tiny.run, config)
    with monkeypatch.context() as patch:
        patch.setattr("eyas.draft.train.open_store", WholeStore)
        train(whole, config)
    assert window_bytes(whole) > BUDGET * 1.3
    assert 0 < most <= BUDGET
    assert len(curve(tiny.run)) > 40
    assert curve(tiny.run) == curve(whole)
    hidden = verify_manifest(tiny.run.hidden)
    assert hidden.counts.done == 10
    assert hidden.figures["windowed_records"] == manifest.counts.done == 90 - 10
    assert manifest.figures["window_shards"] >= 2 * hidden.figures["windowed_shards"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL])
def test_a_killed_training_goes_on_to_the_same_curve(
    tiny: TinyRun, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    whole = RunFolder(tmp_path / "whole")
    shutil.copytree(tiny.run.root, whole.root)
    with monkeypatch.context() as patch:
        patch.setattr("eyas.draft.train.open_store", WholeStore)
        train(whole, config)
    tiny.run.run_json.write_text(json.dumps({"config": config.model_dump(mode="json")}))
    command = [sys.executable, "-m", "eyas.draft.train", "--run", str(tiny.run.root)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    deadline = time.monotonic() + 600  # a hang, not a busy machine
    while not (tiny.run.draft / "metrics.jsonl").is_file() or len(curve(tiny.run)) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(child.pid, number)
    assert child.wait(30) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    assert main(["--run", str(tiny.run.root)]) == 0
    assert curve(tiny.run) == curve(whole)


def test_records_without_states_teach_nothing_and_are_counted(
    tiny: TinyRun, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WindowedStore(tiny.run, config)
    corpus = Corpus.open(tiny.run, store)
    bad = corpus.train[0]
    plan = store._plans[store._row(bad)[0]]
    monkeypatch.setattr(
        "eyas.hidden.extract.states_fault",
        lambda states, num_tokens, size: "not finite" if num_tokens == store.num_tokens(bad) else None,
    )
    refused = {item.id for item in extract_shard(tiny.run, config, plan).quarantined}
    store.expect([bad])
    record = corpus.record(bad)
    assert bad in refused == store.refused()
    assert len(record.tokens) == store.num_tokens(bad)
    assert not record.loss_mask.any()


def test_without_training_only_heldout_states_are_there(tiny: TinyRun, config: RunConfig) -> None:
    assert len(HiddenStore(tiny.run.hidden)) == 10
    with pytest.raises(ArtifactError, match=r"keeps only held-out states \(hidden.disk_budget\)"):
        Corpus.open(tiny.run)


def test_a_shard_that_was_not_expected_is_not_read(tiny: TinyRun, config: RunConfig) -> None:
    corpus = Corpus.open(tiny.run, WindowedStore(tiny.run, config))
    with pytest.raises(ArtifactError, match="was not expected"):
        corpus.record(corpus.train[0])


def test_a_failing_extraction_stops_the_training_with_its_own_words(tiny: TinyRun, config: RunConfig) -> None:
    full = config.model_copy(update={"hidden": config.hidden.model_copy(update={"disk_reserve_bytes": 1 << 60})})
    with pytest.raises(ConfigError, match=r"beside the training.*stay in reserve.*last checkpoint is kept"):
        train(tiny.run, full)


def test_a_budget_without_room_for_two_shards_is_refused_with_numbers(tiny: TinyRun, config: RunConfig) -> None:
    tight = config.model_copy(update={"hidden": config.hidden.model_copy(update={"disk_budget": 60_000})})
    with pytest.raises(ConfigError, match=r"disk_budget is 0\.00 GB, wanted at least .* held-out states"):
        extract(tiny.run, tight)
