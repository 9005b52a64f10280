"""Training of a tiny run: it learns, it stops and resumes to the bit, it refuses what is broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.draft import checkpoint
from eyas.draft.checkpoint import load_checkpoint, load_latest
from eyas.draft.data import Record
from eyas.draft.metrics import METRICS
from eyas.draft.train import Interrupted, main, train
from eyas.draft.trainer import DUMP, Trainer
from eyas.errors import ArtifactError, EyasError
from eyas.progress import Progress
from eyas.workspace import RunFolder
from tests.draft.runs import learnable_records, run_config, write_run, write_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def run(tmp_path: Path, target: Path) -> RunFolder:
    return write_run(tmp_path / "run", target, learnable_records(30), learnable_records(8, 1))


def best_bytes(run: RunFolder) -> bytes:
    name = (run.draft / "checkpoints" / "best").read_text()
    return (run.draft / "checkpoints" / name / "model.safetensors").read_bytes()


def metrics(run: RunFolder) -> list[dict]:
    """The lines without what depends on the clock."""
    rows = [json.loads(line) for line in (run.draft / METRICS).read_bytes().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "positions_per_s", "remaining_s")} for row in rows]


def stop_after(steps: int):
    """A `should_stop` that answers yes from its `steps`-th question on."""
    asked = iter(range(10**9))
    return lambda: next(asked) >= steps


def test_training_learns_and_says_what_it_did(run: RunFolder, target: Path) -> None:
    seen: list[Progress] = []
    manifest = train(run, run_config(target, max_steps=60), seen.append)
    losses = [row["loss"] for row in metrics(run) if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert manifest.counts.done == 30
    assert manifest.figures["steps"] == 60
    assert manifest.figures["accept_length"] > 1.1
    assert seen[-1].is_final
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    assert all(row["per_dataset"]["a"]["step_loss"] == pytest.approx(row["step_loss"], abs=2e-5) for row in rows), "one dataset"
    assert rows[-1]["per_dataset"]["a"]["step_accuracy"] == rows[-1]["step_accuracy"]
    held = [row for row in metrics(run) if row["kind"] == "heldout"]
    assert [row["step"] for row in held] == [10, 20, 30, 40, 50, 60]
    assert all(row["accept_length"] == pytest.approx(1 + row["accepted"] / row["verifications"], abs=1e-4) for row in held)


def test_overfitting_eight_samples_accepts_nearly_every_draft(tmp_path: Path, target: Path) -> None:
    """K = 3: at least K + 0.9 of K + 1, the last verification of each reply aside."""
    records = learnable_records(8, length=40)
    run = write_run(tmp_path / "run", target, records, records)
    train(run, run_config(target, max_steps=200, eval_every=200, batch_tokens=512, learning_rate=1e-2))
    held = [row for row in metrics(run) if row["kind"] == "heldout"][-1]
    assert held["accepted"] / (held["verifications"] - len(records)) >= 2.9


def test_training_learns_from_top_k_probabilities_in_place_of_final_states(tmp_path: Path, target: Path) -> None:
    run = write_run(tmp_path / "run", target, learnable_records(30), learnable_records(8, 1), codec="int4_top")
    manifest = train(run, run_config(target, max_steps=60))
    losses = [row["loss"] for row in metrics(run) if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert manifest.figures["accept_length"] > 1.2


def test_a_finished_training_is_left_alone(run: RunFolder, target: Path) -> None:
    config = run_config(target, max_steps=10)
    first = train(run, config)
    before = (run.draft / METRICS).stat().st_mtime_ns
    assert train(run, config) == first
    assert (run.draft / METRICS).stat().st_mtime_ns == before


@pytest.mark.parametrize("steps", [1, 9, 10, 17, 39])
def test_a_stopped_training_resumes_to_the_bit(tmp_path: Path, run: RunFolder, target: Path, steps: int) -> None:
    config = run_config(target)
    whole = RunFolder(tmp_path / "whole")
    shutil.copytree(run.root, whole.root)
    train(whole, config)

    with pytest.raises(Interrupted, match=f"step {steps}"):
        train(run, config, should_stop=stop_after(steps))
    train(run, config)

    assert best_bytes(run) == best_bytes(whole)
    assert [row for row in metrics(run) if row["kind"] == "heldout"] == [row for row in metrics(whole) if row["kind"] == "heldout"]


def test_accumulated_batches_give_the_loss_of_one_large_batch(run: RunFolder, target: Path, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    shutil.copytree(run.root, other.root)
    train(run, run_config(target, batch_tokens=240, accumulate=1, max_steps=3, log_every=1))
    train(other, run_config(target, batch_tokens=120, accumulate=2, max_steps=3, log_every=1))
    losses = [[row["loss"] for row in metrics(item) if row["kind"] == "train"] for item in (run, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def start_child(run: RunFolder, config: RunConfig) -> subprocess.Popen[bytes]:
    run.run_json.write_text(json.dumps({"config": config.model_dump(mode="json")}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "eyas.draft.train", "--run", str(run.root)], env=environment, stderr=subprocess.PIPE
    )


def wait_for_steps(run: RunFolder, steps: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        path = run.draft / METRICS
        if path.is_file() and path.read_bytes().count(b'"kind":"train"') >= steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {steps} steps within 240 s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_continues_to_the_same_draft(tmp_path: Path, run: RunFolder, target: Path, number: signal.Signals) -> None:
    config = run_config(target, max_steps=120, log_every=1)
    whole = RunFolder(tmp_path / "whole")
    shutil.copytree(run.root, whole.root)
    train(whole, config)

    child = start_child(run, config)
    wait_for_steps(run, 23)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=240)
    assert child.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), stderr.decode()
    if number == signal.SIGTERM:
        assert b"run the same command to continue" in stderr
    assert main(["--run", str(run.root)]) == 0

    assert best_bytes(run) == best_bytes(whole)
    assert metrics(run) == metrics(whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run: RunFolder, target: Path) -> None:
    config = run_config(target)
    with pytest.raises(Interrupted):
        train(run, config, should_stop=stop_after(25))
    newest = sorted((run.draft / "checkpoints").glob("step-*"))[-1]
    fingerprint = load_checkpoint(newest).state.fingerprint
    (newest / "optimizer.safetensors").write_bytes(b"torn")
    found = load_latest(run.draft / "checkpoints", fingerprint)
    assert found is not None
    assert found.state.step == 20


@pytest.mark.parametrize("content", [b"../../../etc", b"\xff\x00", b"step-00000010", b""])
def test_a_damaged_pointer_to_the_best_is_written_anew(run: RunFolder, target: Path, content: bytes) -> None:
    config = run_config(target)
    manifest, wanted = train(run, config), best_bytes(run)
    pointer = run.draft / "checkpoints" / "best"
    assert pointer.read_bytes() != content
    pointer.write_bytes(content)
    assert train(run, config).files == manifest.files
    assert best_bytes(run) == wanted


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_damaged_best_checkpoint_is_trained_again_to_the_bit(run: RunFolder, target: Path, name: str) -> None:
    """The newest checkpoint is whole, and names this one as the best: neither may the damage be exported nor block the run."""
    config = run_config(target, learning_rate=1e-9, patience=2, max_steps=1000, keep_checkpoints=1)
    manifest, wanted = train(run, config), best_bytes(run)
    assert (manifest.figures["best_step"], manifest.figures["steps"]) == (10, 30)
    damaged = run.draft / "checkpoints" / "step-00000010" / name
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.write_bytes(content)
    (run.draft / "manifest.json").unlink()
    assert train(run, config).files == manifest.files
    assert best_bytes(run) == wanted


@pytest.mark.parametrize("num_files", [0, 1])
def test_a_process_that_dies_while_it_writes_leaves_the_last_checkpoint(
    run: RunFolder, target: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    """The second checkpoint is cut off before its first file or between its two; the training then continues from the first."""
    written: list[Path] = []

    def cut_off(tensors: dict, path: Path) -> None:
        if len(written) == 2 + num_files:
            path.write_bytes(b"torn")
            raise KeyboardInterrupt
        written.append(path)
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train(run, run_config(target))
    monkeypatch.undo()
    folders = {folder.name for folder in (run.draft / "checkpoints").glob("step-*")}
    assert folders == {"step-00000010"}
    assert train(run, run_config(target)).figures["steps"] == 40
    assert not list((run.draft / "checkpoints").glob(".*"))


def test_batches_that_teach_nothing_are_counted_by_reason(tmp_path: Path, target: Path) -> None:
    run = write_run(tmp_path / "run", target, learnable_records(6), learnable_records(2, 1), kept_ids=list(range(48, 96)))
    manifest = train(run, run_config(target, max_steps=4, log_every=2, eval_every=4))
    last = [row for row in metrics(run) if row["kind"] == "train"][-1]
    assert last["skipped"] == {"outside_draft_vocabulary": 4}
    assert (last["loss"], last["dropped"]) == (0.0, last["supervised"])
    assert manifest.figures["skipped_batches"] == 4


def test_a_checkpoint_of_other_settings_is_never_continued(run: RunFolder, target: Path) -> None:
    with pytest.raises(Interrupted):
        train(run, run_config(target), should_stop=stop_after(15))
    manifest = train(run, run_config(target, learning_rate=1e-3, max_steps=20))
    assert manifest.figures["steps"] == 20
    assert [row["step"] for row in metrics(run) if row["kind"] == "train"] == [5, 10, 15, 20]


def test_old_checkpoints_are_removed_but_the_best_stays(run: RunFolder, target: Path) -> None:
    train(run, run_config(target, keep_checkpoints=1, max_steps=60))
    names = {folder.name for folder in (run.draft / "checkpoints").glob("step-*")}
    assert names == {"step-00000060", (run.draft / "checkpoints" / "best").read_text()}


def test_patience_ends_the_training(run: RunFolder, target: Path) -> None:
    manifest = train(run, run_config(target, learning_rate=1e-9, patience=2, max_steps=1000))
    assert manifest.figures["steps"] == 30
    assert manifest.figures["best_step"] == 10


def test_records_without_supervised_tokens_are_counted_and_never_divide_by_zero(tmp_path: Path, target: Path) -> None:
    """https://github.com/verl-project/verl/issues/785, https://github.com/huggingface/trl/issues/6668: cut after the prompt."""
    cut = learnable_records(4, 2, length=16, prompt=16)
    run = write_run(tmp_path / "run", target, [*learnable_records(6), *cut], learnable_records(2, 1))
    manifest = train(run, run_config(target, max_steps=5))
    assert (manifest.counts.num_in, manifest.counts.done, manifest.counts.rejected) == (10, 6, 4)
    assert manifest.rejected_by_reason == {"no_supervised_token": 4}


def test_a_run_with_nothing_to_learn_is_refused(tmp_path: Path, target: Path) -> None:
    """https://github.com/marin-community/marin/issues/7237: a mask that is all zero says so instead of training on nothing."""
    run = write_run(tmp_path / "run", target, learnable_records(4, length=16, prompt=16), learnable_records(2, 1))
    with pytest.raises(ArtifactError, match="none of 4 training records"):
        train(run, run_config(target))


def test_a_state_that_is_not_finite_names_its_record_and_layer(tmp_path: Path, target: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/615: NaN states reached the training."""
    records = learnable_records(6)
    records[3].aux[10, 40] = float("nan")  # the middle layer's part
    run = write_run(tmp_path / "run", target, records, learnable_records(2, 1))
    with pytest.raises(ArtifactError, match=rf"{records[3].id}.*middle.*row 10"):
        train(run, run_config(target))


def test_a_loss_that_is_not_finite_stops_with_the_records(run: RunFolder, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer._loss

    def spoilt(self: Trainer, *args: object) -> object:
        result = original(self, *args)
        if self.state.step == 12:
            result.loss.data.fill_(float("nan"))
        return result

    monkeypatch.setattr(Trainer, "_loss", spoilt)
    with pytest.raises(EyasError, match="loss is nan at step 12 on records"):
        train(run, run_config(target))
    dump = json.loads((run.draft / DUMP).read_bytes())
    assert dump["step"] == 12
    assert dump["ids"]
    assert load_checkpoint(run.draft / "checkpoints" / "step-00000010").state.step == 10


def test_a_hidden_store_that_lacks_records_is_refused(tmp_path: Path, target: Path) -> None:
    from eyas.target.config import TargetConfig
    from eyas.target.spec import load_target
    from tests.draft.runs import write_hidden

    records = learnable_records(6)
    run = write_run(tmp_path / "run", target, records, learnable_records(2, 1))
    write_hidden(run.hidden, records, load_target(TargetConfig(model=str(target))))
    with pytest.raises(ArtifactError, match="lacks 2 records"):
        train(run, run_config(target))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_precision_trains(run: RunFolder, target: Path, dtype: str) -> None:
    manifest = train(run, run_config(target, dtype=dtype, max_steps=60))
    assert manifest.figures["dtype"] == dtype
    assert manifest.figures["accept_length"] > 1.1


def test_the_map_comes_from_the_run_and_a_map_of_ids_is_refused(run: RunFolder, target: Path) -> None:
    """https://github.com/verl-project/verl-SpeCo/pull/67: d2t held ids where engines add offsets."""
    path = run.merged / "vocab_map.safetensors"
    tensors = load_file(path)
    save_file({"d2t": torch.arange(len(tensors["d2t"])) * 2, "t2d": tensors["t2d"]}, path)
    from eyas.draft.corpus import read_map

    with pytest.raises(ArtifactError, match="d2t must hold offsets"):
        read_map(path)


def test_records_of_two_turns_train(tmp_path: Path, target: Path) -> None:
    records = learnable_records(6)
    for record in records:
        record.loss_mask[12:15] = 0
    run = write_run(tmp_path / "run", target, records, [Record(**{**vars(learnable_records(1, 1)[0]), "dataset": "b"})])
    manifest = train(run, run_config(target, max_steps=10))
    assert manifest.counts.done == 6
    assert list([row for row in metrics(run) if row["kind"] == "heldout"][-1]["per_dataset"]) == ["b"]
