"""A run has one writer: whoever else comes is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas.operate import cli, pipeline
from eyas.workspace import RunFolder

VERBS = [["prepare"], ["run", "--no-prefect"], ["run"]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_command_refused_because_another_runs_changes_nothing(
    verb: list[str], run: RunFolder, config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run recorded is what its trainer reads: a refused command's settings must not reach it."""
    run.logs.mkdir(parents=True, exist_ok=True)
    (run.logs / "flow.log").write_text("the log of the one that runs\n")
    before = {path: path.read_bytes() for path in (run.run_json, run.logs / "flow.log")}
    words = [*verb, "--config", str(config_file()), "--run", str(run.root), "--set", "draft.epochs=6"]
    with pipeline.held(run):
        assert cli.main(words) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert not (run.logs / "config.yaml").exists()


def test_a_second_command_before_the_first_ones_flow_has_the_run_changes_nothing(
    run: RunFolder, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flow takes ten seconds to start: the config that it is about to read is another command's until then."""
    words = ["run", "--config", str(config_file()), "--run", str(run.root)]
    codes: list[int] = []

    @contextmanager
    def starting(command: list[str], **options: object) -> Iterator[SimpleNamespace]:
        if not codes:
            (run.logs / "flow.log").write_text("the first one's log\n")
            codes.append(cli.main([*words, "--set", "draft.epochs=6"]))
        yield SimpleNamespace(wait=lambda timeout: 1)

    monkeypatch.setattr("eyas.operate.children.child_process", starting)
    assert cli.main(words) == 1
    assert codes == [2]
    assert "is in use by process" in capsys.readouterr().err
    assert (run.logs / "flow.log").read_text() == "the first one's log\n"
    assert '"epochs": 6' not in (run.logs / "config.yaml").read_text()


def test_a_plan_with_other_settings_is_printed_and_recorded_nowhere(run: RunFolder) -> None:
    before = run.run_json.read_bytes()
    assert cli.main(["plan", "--run", str(run.root), "--set", "draft.epochs=9"]) == 0
    assert run.run_json.read_bytes() == before


def test_a_command_records_its_config_once_it_holds_the_run(
    run: RunFolder, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setitem(pipeline._STEPS, "prepare", lambda work: seen.append('"epochs": 6' in run.run_json.read_text()))
    monkeypatch.setattr(pipeline, "phase_end", lambda run, phase: "")
    assert cli.main(["prepare", "--config", str(config_file()), "--run", str(run.root), "--set", "draft.epochs=6"]) == 0
    assert seen == [True]


@pytest.mark.parametrize("damaged", ["null", '{"config": {}}', '{"config": {"na'])
def test_a_damaged_run_json_is_written_anew_from_the_config_that_is_given(
    damaged: str, run: RunFolder, config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run.run_json.read_bytes()
    run.run_json.write_text(damaged)
    assert cli.main(["status", "--run", str(run.root)]) == 2
    monkeypatch.setitem(pipeline._STEPS, "prepare", lambda work: None)
    monkeypatch.setattr(pipeline, "phase_end", lambda run, phase: "")
    assert cli.main(["prepare", "--config", str(config_file()), "--run", str(run.root)]) == 0
    assert run.run_json.read_bytes() == right


def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_the_logs(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    monkeypatch.setattr("eyas.operate.status.read_status", lambda root: [][1])
    assert cli.main(["status", "--run", str(run.root)]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: unexpected IndexError: list index out of range;")
    assert line.count("\n") == 1
    assert "Traceback" in (run.logs / "error.log").read_text()


def test_no_draft_is_deployed_on_a_host_whose_run_is_at_work(
    finished_run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that generates would be taken from it."""
    switched: list[object] = []
    monkeypatch.setattr("eyas.operate.deploy.deploy_run", lambda *_, **__: switched.append(1))
    with pipeline.held(finished_run):
        assert cli.main(["deploy", "--run", str(finished_run.root)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    (finished_run.benchmark / "manifest.json").unlink()
    assert cli.main(["deploy", "--run", str(finished_run.root)]) == 2
    assert "eyas bench" in capsys.readouterr().err
    assert switched == []
