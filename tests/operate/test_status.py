"""The status is read from the folder alone, and right while it runs, after a crash, and when a file was damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from eyas.files import read_json, write_json
from eyas.manifest import load_manifest
from eyas.operate.messages import read_history
from eyas.operate.screen import describe_end, render_result, render_status
from eyas.operate.status import RunStatus, covered_s, read_status
from eyas.operate.verbs import show_result
from eyas.progress import Progress, recorder
from eyas.workspace import RunFolder


def states(status: RunStatus) -> dict[str, str]:
    return {phase.phase: phase.state for phase in status.phases}


def report_half(run: RunFolder) -> None:
    recorder(run.progress)(
        Progress(
            stage="generate",
            name="B2_code",
            done=3,
            total=4,
            unit="records",
            figures={
                "rejected": 1,
                "remaining_s": 30,
                "tokens_mean": 12.5,
                "share_cached_tokens": 0.375,
                "gates": "repetition",
            },
        )
    )


def text_of(status: RunStatus) -> str:
    return text_of_renderable(render_status(status))


def text_of_renderable(view: RenderableType) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view)
    return console.export_text()


def test_finished_run(finished_run: RunFolder) -> None:
    status = read_status(finished_run.root)
    assert status.state == "done"
    assert set(states(status).values()) == {"done"}
    assert status.phases[0].counts == {"in": 44, "done": 8, "rejected": 36, "pending": 0}
    assert status.phases[0].rejected_by_reason == {
        "duplicate": 4,
        "near_duplicate": 2,
        "contaminated": 8,
        "no_user_turn": 10,
        "bad_json": 12,
    }
    assert status.results["outputs"]["wrong"] == 0
    assert "speed-up" in text_of(status)


def test_a_finished_phase_is_told_in_one_sentence(finished_run: RunFolder) -> None:
    """What was rejected, by its most frequent reason first, and the seconds of the manifests that the report shows, too."""
    phase = read_status(finished_run.root).phases[0]
    sentence = describe_end(phase.model_copy(update={"rejected_by_reason": {"too_long": 2, "over_quota": 2_000}}))
    counts = phase.counts
    assert sentence.endswith(
        f"{counts['in']:,} in, {counts['done']:,} done, {counts['rejected']:,} rejected (2,000 over quota, 2 too long)"
    )
    assert re.match(r"prepare done in \d+ (s|min|h): ", sentence)
    assert describe_end(phase.model_copy(update={"worked_s": None})) == "prepare done"


def test_the_end_of_a_run_says_what_it_came_to(finished_run: RunFolder) -> None:
    results = read_json(finished_run.benchmark / "results.json")
    text = text_of_renderable(render_result(finished_run))
    point = results["timing"][0]
    for part in (
        f"95 %: {results['accept_length']['interval_95'][0]:.2f}",
        f"bigram {results['baselines']['bigram']:.3f}",
        f"speed-up {point['speedup']:.2f}× at {point['concurrency']} in flight ({point['speedup_min']:.2f}–",
        f"{results['outputs']['checked']} replies with the draft beside the target's own",
        "training: best accept length",
    ):
        assert part in text


def test_the_end_of_a_command_names_the_draft_the_report_and_the_whole_time(
    finished_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    show_result(finished_run, took_s=200.0, opens=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"report: {finished_run.root / 'report.html'}", "in all: 3 min, the start of servers included"]
    assert any(line.startswith(f"draft: {finished_run.export}") for line in lines)


def test_new_run(run: RunFolder) -> None:
    assert read_status(run.root).state == "new"


def test_running_phase_counts_manifests_and_progress_once(half_run: RunFolder) -> None:
    report_half(half_run)
    status = read_status(half_run.root)
    assert states(status)["generate"] == "running"
    assert status.phases[1].counts == {"in": 8, "done": 6, "rejected": 1, "pending": 1}
    assert status.datasets[1].responses == {"in": 4, "done": 2, "rejected": 1, "pending": 1}
    assert status.datasets[1].figures["tokens_mean"] == 12.5
    text = text_of(status)
    assert "30 s left" in text
    assert "B2_code" in text
    assert next(line.split()[-2:] for line in text.splitlines() if line.startswith("B2_code")) == ["38%", "repetition"]


def test_a_generation_that_cannot_know_its_end_yet_gets_no_straight_line(half_run: RunFolder) -> None:
    progress = Progress(stage="generate", name="B2_code", done=3, total=4, unit="records", figures={"remaining_s": "unknown"})
    recorder(half_run.progress)(progress)
    status = read_status(half_run.root)
    assert status.phases[1].progress[-1].remaining_s is None
    assert "time left unknown yet" in text_of(status)


def test_progress_in_tokens_is_not_counted_as_records(half_run: RunFolder) -> None:
    recorder(half_run.progress)(Progress(stage="extract", name="B1_calls", done=500, total=1000, unit="tokens"))
    status = read_status(half_run.root)
    assert status.phases[3].counts == {}
    assert "500 of 1,000 tokens (50%)" in text_of(status)


def test_killed_process_is_stopped_not_running(half_run: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from eyas.progress import *; "
        "recorder(Path(sys.argv[1]))(Progress(stage='generate', name='B2_code', done=1, total=4, unit='records'))"
    )
    subprocess.run([sys.executable, "-c", code, str(half_run.progress)], check=True)  # has ended without a final message
    status = read_status(half_run.root)
    assert states(status)["generate"] == "stopped"
    assert status.state == "stopped"


def test_living_process_without_progress_is_stalled(half_run: RunFolder) -> None:
    report_half(half_run)
    path = half_run.progress / "generate-B2_code.json"
    write_json(path, read_json(path) | {"at": "2026-01-01T00:00:00+00:00"})
    status = read_status(half_run.root)
    assert states(status)["generate"] == "stalled"
    assert any("stalled" in alarm for alarm in status.alarms)


def test_damaged_output_is_named(finished_run: RunFolder) -> None:
    path = finished_run.responses("B1_calls") / "tokenized_data.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    status = read_status(finished_run.root)
    assert states(status)["generate"] == "damaged"
    assert any("tokenized_data.jsonl" in alarm for alarm in status.alarms)


def test_changed_inputs_make_what_follows_outdated(finished_run: RunFolder) -> None:
    manifest = load_manifest(finished_run.responses("B1_calls"))
    manifest.model_copy(update={"inputs": {"prompts": "0" * 64}}).write(finished_run.responses("B1_calls"))
    status = read_status(finished_run.root)
    assert states(status)["generate"] == "outdated"
    assert status.state == "stopped"


def test_events_that_ended_are_no_alarms(half_run: RunFolder) -> None:
    report_half(half_run)
    lines = [
        '{"kind":"gate","level":"warning","name":"B1","message":"many cut","is_over":false,"at":"t"}',
        '{"kind":"disk","level":"warning","name":"","message":"low","is_over":false,"at":"t"}',
        '{"kind":"gate","level":"info","name":"B1","message":"over","is_over":true,"at":"t"}',
        '{"kind":"torn',
    ]
    (half_run.progress / "events.jsonl").write_text("\n".join(lines))
    assert [alarm for alarm in read_status(half_run.root).alarms if "gate" in alarm or "low" in alarm] == ["disk : low"]


def test_progress_folder_may_be_deleted(half_run: RunFolder) -> None:
    report_half(half_run)
    shutil.rmtree(half_run.progress)
    assert states(read_status(half_run.root))["generate"] == "stopped"


def test_recorder_keeps_the_last_message_and_a_thinned_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("eyas.progress.time.monotonic", lambda: clock[0])
    report = recorder(tmp_path)
    num_seconds = 4_000
    for second in range(num_seconds):
        clock[0] += 1.0
        report(Progress(stage="train", done=second, total=num_seconds, unit="steps"))
    report(Progress(stage="train", done=num_seconds, total=num_seconds, unit="steps", is_final=True))
    history = read_history(tmp_path)
    assert read_json(tmp_path / "train.json")["done"] == num_seconds
    assert 300 < len(history) < 1_200
    assert [message.done for message in history] == sorted(message.done for message in history)


def test_recorder_survives_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder(tmp_path / "file" / "progress")(Progress(stage="train", done=1, total=2, unit="steps"))


def test_adopted_replies_are_counted_at_once(run: RunFolder) -> None:
    """They lie in a journal, without a manifest: generation has begun, and nobody works on it."""
    recorder(run.progress)(Progress(stage="generate", name="B1_calls", done=3, total=10, unit="records", figures={"rejected": 0}))
    path = run.progress / "generate-B1_calls.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 2**22 + 1}))  # `eyas adopt` has ended
    status = read_status(run.root)
    generate = next(phase for phase in status.phases if phase.phase == "generate")
    assert (generate.state, generate.counts) == ("stopped", {"in": 10, "done": 3, "rejected": 0, "pending": 7})
    assert next(item for item in status.datasets if item.dataset == "B1_calls").responses["pending"] == 7


def test_time_between_the_pieces_of_a_phase_is_no_work() -> None:
    """A dataset repaired a week later took its minutes, not a week; two that ran side by side took the longer one's."""
    first, beside, later = ("08:00", "08:10"), ("08:05", "08:12"), ("09:00", "09:01")
    spans = [(f"2026-12-02T{start}:00+00:00", f"2026-12-02T{end}:00+00:00") for start, end in (later, first, beside)]
    assert covered_s(spans) == 13 * 60
    assert covered_s([*spans, ("", "2026-12-02T10:00:00+00:00")]) is None
