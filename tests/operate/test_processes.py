"""Children, hosts and the pipeline without phases that cost time: what starts, what ends, what is recorded."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TextColumn

from eyas.config import RunConfig
from eyas.errors import ConfigError, EyasError
from eyas.files import read_json
from eyas.operate import pipeline
from eyas.operate.children import child_process, is_alive, last_lines, wait_for
from eyas.operate.following import follow_log, follow_progress, readable
from eyas.operate.terminal import PlainLines, TerminalBars
from eyas.progress import Progress, recorder
from eyas.workspace import RunFolder, exclusive


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_and_its_own_children_end_with_the_block(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with child_process(
        ["/bin/sh", "-c", f"trap '' INT; sleep 600 & echo $! > {note}; wait"], log=tmp_path / "log", grace_s=0.3
    ) as child:
        wait_until(lambda: note.exists() and note.read_text().strip() != "")
    assert child.poll() is not None
    wait_until(lambda: not is_alive(int(note.read_text())))


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import time
from pathlib import Path
from eyas.operate.children import child_process
with child_process(["sleep", "600"]) as child:
    Path({str(note)!r}).write_text(str(child.pid))
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: note.exists() and note.read_text() != "")
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(int(note.read_text())))


@pytest.mark.parametrize("death_signal", ["SIGKILL", "SIGINT"])
def test_a_childs_own_child_ends_when_the_parent_is_killed(tmp_path: Path, death_signal: str) -> None:
    """https://github.com/PrefectHQ/prefect/issues/20979: the kernel's signal reaches the child alone."""
    note = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {note}; wait"
    code = f"""
import signal, time
from eyas.operate.children import child_process
with child_process(["/bin/sh", "-c", {script!r}], parent_death_signal=signal.{death_signal}):
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: note.exists() and note.read_text().strip() != "")
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(int(note.read_text())), seconds=100)


def test_a_child_hears_the_interrupt_that_a_shells_ampersand_has_us_ignore(tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started = time.monotonic()
        with child_process(["sleep", "600"], log=tmp_path / "log", grace_s=600) as child:
            pass
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert child.returncode == -signal.SIGINT
    assert time.monotonic() - started < 240


def test_the_log_of_a_child_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with child_process(["/bin/sh", "-c", "echo first; echo 'what went wrong' >&2; exit 3"], log=log) as child:
        assert wait_for(child, lambda: None) == 3
    assert last_lines(log) == "what went wrong"


def test_phases_run_in_order_and_a_failure_is_recorded(run: RunFolder, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def step(name: str) -> Callable[[object], str]:
        def work(_: object) -> str:
            calls.append(name)
            if name == "extract":
                raise EyasError("the disk is gone")
            return name

        return work

    monkeypatch.setattr(pipeline, "_STEPS", {name: step(name) for name in pipeline.PHASES})
    assert pipeline.run_pipeline(run, config, phases=["merge", "prepare"]) == {"prepare": "prepare", "merge": "merge"}
    calls.clear()
    with pytest.raises(EyasError, match="the disk is gone"):
        pipeline.run_pipeline(run, config)
    assert calls == ["prepare", "generate", "merge", "extract"]
    rows = {row["phase"]: row for row in read_json(run.plan_json)["phases"]}
    assert (rows["extract"]["state"], rows["extract"]["message"]) == ("failed", "the disk is gone")


def test_one_run_has_one_worker(run: RunFolder, config: RunConfig) -> None:
    with exclusive(run.root / ".lock", "this run"), pytest.raises(ConfigError, match=str(os.getpid())):
        pipeline.run_pipeline(run, config, phases=["merge"])


def test_run_json_names_config_versions_and_target(run: RunFolder, config: RunConfig) -> None:
    about = read_json(run.run_json)
    assert about["config"] == config.model_dump(mode="json")
    assert about["packages"]["torch"]
    assert len(about["target_fingerprint"]) == 64
    assert about["target"]["hidden_size"] == 32


def test_a_failed_trainer_is_told_with_its_own_words(run: RunFolder) -> None:
    with pytest.raises(EyasError, match=r"training ended with code \d.*manifest.json"):
        pipeline.train_in_child(run)


def test_plain_lines_are_few_and_say_rate_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr("eyas.operate.terminal.time.monotonic", lambda: clock[0])
    show = PlainLines(every_s=20.0)
    for done in range(0, 101):
        show(Progress(stage="generate", name="B1", done=done, total=200, unit="records", figures={"tokens_mean": 3.25}))
        clock[0] += 1.0
    show(Progress(stage="generate", name="B1", done=200, total=200, unit="records", is_final=True))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7  # at the start, every 20 s, at the end
    assert lines[0] == "generate B1: 0 of 200 records  tokens mean 3.25"
    assert lines[2] == "generate B1: 40 of 200 records  1.0/s, 3 min left  tokens mean 3.25"
    assert lines[-1] == "generate B1: 200 of 200 records"


def test_a_bar_that_has_ended_becomes_a_line() -> None:
    """Thirty finished bars would fill the screen and push what moves out of sight."""
    console = Console(force_terminal=True, highlight=False, width=100, height=20, file=io.StringIO())
    with Bars(TextColumn("{task.description}"), console=console, auto_refresh=False) as bars:
        show = TerminalBars(bars)
        show(Progress(stage="merge", done=500, total=1_000, unit="bytes"))
        show(Progress(stage="train", done=1, total=9, unit="steps", figures={"loss": 2.5}))
        assert [task.description for task in bars.tasks] == ["merge", "train"]
        for _ in range(2):
            show(Progress(stage="merge", done=1_500, total=1_500, unit="bytes", is_final=True))
        assert [task.description for task in bars.tasks] == ["train"]
    assert console.file.getvalue().count("merge: 1.5 kB of 1.5 kB") == 1  # type: ignore[attr-defined]


def test_a_flows_log_is_read_without_what_is_shown_otherwise() -> None:
    said: list[str] = []
    pass_on = readable(said.append)
    for line in (
        "Prefect UI while it runs: http://127.0.0.1:4200/runs",
        "05:43:22.244 | INFO    | prefect.engine - View at http://127.0.0.1:4200/runs/flow-run/c1087d6e-f219",
        "05:43:22.339 | INFO    | Flow run 'pipeline runs/demo-quick' - Beginning flow run 'pipeline runs/demo-quick'",
        "05:43:26.387 | INFO    | Task run 'candidates B7' - Finished in state Completed()",
        "05:43:27.387 | INFO    | Flow run 'pipeline runs/demo-quick' - prepare done in 5 s: 9 in - 8 done",
        "05:44:05.115 | WARNING | eyas.generation.session - dataset B2: 34% of the last 50 replies are empty",
        "05:44:06.115 | ERROR   | Task run 'merge' - Finished in state Failed('no space')",
        "  a line of a traceback - with a dash",
    ):
        pass_on(line)
    assert said == [
        "Prefect UI while it runs: http://127.0.0.1:4200/runs",
        "prepare done in 5 s: 9 in - 8 done",
        "warning: dataset B2: 34% of the last 50 replies are empty",
        "error: Finished in state Failed('no space')",
        "  a line of a traceback - with a dash",
    ]


def test_another_process_is_followed_from_where_it_stands(tmp_path: Path) -> None:
    recorder(tmp_path)(Progress(stage="train", done=1, total=9, unit="steps"))
    said: list[str] = []
    seen: list[int] = []
    progress = follow_progress(tmp_path, lambda message: seen.append(message.done), stage="train")
    lines = follow_log(tmp_path / "log", said.append)
    lines()
    progress()
    (tmp_path / "log").write_text("first\nsec")
    recorder(tmp_path)(Progress(stage="train", done=2, total=9, unit="steps"))
    recorder(tmp_path)(Progress(stage="merge", done=5, total=9, unit="records"))
    for _ in range(2):
        lines()
        progress()
    (tmp_path / "log").write_text("first\nsecond\n")
    lines()
    assert (said, seen) == (["first", "second"], [2])
