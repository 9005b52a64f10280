"""Training in several processes: the same curve as in one, checkpoints that know no number of processes, plain refusals."""

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

from eyas.config import RunConfig
from eyas.draft.config import DraftConfig
from eyas.draft.metrics import METRICS
from eyas.draft.train import Interrupted, main, train
from eyas.draft.trainer import DUMP
from eyas.operate.children import child_process, is_alive
from eyas.workspace import RunFolder
from tests.draft.ranks import TIMEOUT_S, curve, free_port, train_in_ranks
from tests.draft.runs import learnable_records, run_config, write_run, write_target

# 30 records in batches of two, four batches a step: each epoch's last step has fewer batches than the others
SETTINGS = {"max_steps": 10, "batch_tokens": 48, "accumulate": 4, "log_every": 1, "eval_every": 5}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("ranks") / "target")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target: Path) -> RunFolder:
    """A training in one process, finished."""
    run = write_run(tmp_path_factory.mktemp("ranks") / "run", target, learnable_records(30), learnable_records(8, 1))
    train(run, config(target))
    return run


@pytest.fixture
def run(tmp_path: Path, alone: RunFolder) -> RunFolder:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(alone.root, copy.root)
    shutil.rmtree(copy.draft)
    return copy


def config(target: Path, **draft: object) -> RunConfig:
    return run_config(target, **{**SETTINGS, **draft})


def assert_same_curve(run: RunFolder, alone: RunFolder) -> None:
    found, wanted = curve(run), curve(alone)
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        assert row == pytest.approx(other, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize(
    ("size", "stage"),
    [(2, 0), (2, 2), *(pytest.param(*item, marks=pytest.mark.soak) for item in [(2, 1), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)])],
)
def test_any_number_of_processes_gives_the_curve_of_one_and_continues_in_one(
    run: RunFolder, alone: RunFolder, target: Path, size: int, stage: int
) -> None:
    answers = train_in_ranks(run, config(target, processes=size, zero_stage=stage), size, stop_after=6)
    assert all(answer.startswith("Interrupted") for answer in answers), answers
    assert [row[0] for row in curve(run)][-1] == 6
    train(run, config(target))  # from the checkpoint that all of them wrote
    assert_same_curve(run, alone)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_a_training_of_one_process_continues_in_two(run: RunFolder, alone: RunFolder, target: Path, stage: int) -> None:
    with pytest.raises(Interrupted):
        train(run, config(target), should_stop=iter([False] * 4 + [True]).__next__)
    assert train_in_ranks(run, config(target, processes=2, zero_stage=stage), 2) == ["", ""]
    assert_same_curve(run, alone)
    manifest = json.loads((run.draft / "manifest.json").read_bytes())
    assert manifest["figures"]["processes"] == 2


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "dtype"), [(2, "bfloat16"), (3, "float32")])
def test_divided_training_resumes_to_the_bit(run: RunFolder, target: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    settings = config(target, processes=2, zero_stage=stage, dtype=dtype)
    whole = RunFolder(tmp_path / "whole")
    shutil.copytree(run.root, whole.root)
    assert train_in_ranks(whole, settings, 2) == ["", ""]
    train_in_ranks(run, settings, 2, stop_after=7)
    assert train_in_ranks(run, settings, 2) == ["", ""]
    last = Path("checkpoints") / "step-00000010"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (run.draft / last / name).read_bytes() == (whole.draft / last / name).read_bytes()


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_loss_that_is_not_finite_on_one_process_stops_all_with_its_records(run: RunFolder, target: Path, stage: int) -> None:
    answers = train_in_ranks(run, config(target, processes=2, zero_stage=stage), 2, spoil_rank=1)
    assert all("loss is nan at step 3 on records" in answer for answer in answers), answers
    ids = json.loads((run.draft / DUMP).read_bytes())["ids"]
    assert [int(item, 16) for item in ids] == [26, 27]  # of the epoch's last three batches the second process has the middle one


def test_impossible_numbers_of_processes_are_refused_in_plain_words() -> None:
    with pytest.raises(ValueError, match=r"accumulate is 1, wanted at least 8: one micro-batch for each of 4 processes on 2 hosts"):
        DraftConfig(processes=4, hosts=2, rendezvous="a:1")
    with pytest.raises(ValueError, match="name host:port of the first host"):
        DraftConfig(processes=4, hosts=2, accumulate=8)


def write_config(run: RunFolder, settings: RunConfig) -> list[str]:
    run.run_json.write_text(json.dumps({"config": settings.model_dump(mode="json")}))
    return ["-m", "eyas.draft.train", "--run", str(run.root)]


def wait_for_steps(run: RunFolder, steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (run.draft / METRICS).is_file() or (run.draft / METRICS).read_bytes().count(b'"kind":"train"') < steps:
        assert time.monotonic() < deadline, f"no {steps} steps within {TIMEOUT_S:.0f} s"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    return [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_the_processes_of_a_launch_save_and_end_with_it(run: RunFolder, target: Path, number: signal.Signals) -> None:
    """https://github.com/PrefectHQ/prefect/issues/20979: ranks must not outlive the process that a task watches."""
    settings = config(target, processes=2, max_steps=4000)
    log = run.root / "log"
    with child_process([sys.executable, *write_config(run, settings)], log=log, grace_s=5) as child:
        wait_for_steps(run, 3)
        ranks = children_of(child.pid)
        child.send_signal(number)
        child.wait(timeout=TIMEOUT_S)
    assert len(ranks) >= 2
    deadline = time.monotonic() + TIMEOUT_S
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    if number == signal.SIGTERM:
        assert child.returncode == 130, log.read_text()
        assert "run the same command to continue" in log.read_text()
        saved = sorted((run.draft / "checkpoints").glob("step-*"))[-1]
        last = json.loads((run.draft / METRICS).read_bytes().splitlines()[-1])
        assert int(saved.name.removeprefix("step-")) == last["step"]


@pytest.mark.soak
def test_bad_input_found_by_a_process_keeps_its_exit_code(run: RunFolder, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(write_config(run, config(target / "absent", processes=2))[2:]) == 2
    assert "is no model folder" in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_other_launchers_start_the_same_training(run: RunFolder, alone: RunFolder, target: Path, launcher: str) -> None:
    command = write_config(run, config(target, processes=2, zero_stage=2))
    start = {
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "--",
            *command[1:],
        ],
        "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module", *command[1:]],
    }[launcher]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_curve(run, alone)


@pytest.mark.soak
def test_two_hosts_meet_and_train_together(run: RunFolder, alone: RunFolder, target: Path) -> None:
    """Two launchers on this machine stand for two hosts."""
    command = write_config(run, config(target, hosts=2, zero_stage=3, rendezvous=f"127.0.0.1:{free_port()}"))
    hosts = [subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE) for _ in range(2)]
    for host in hosts:
        _, stderr = host.communicate(timeout=TIMEOUT_S)
        assert host.returncode == 0, stderr.decode()[-3000:]
    assert_same_curve(run, alone)
