"""The command line's own promises: help, exit codes, keys, and how it ends on Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.errors import ConfigError, EyasError, TooManyRejects
from eyas.operate import cli, verbs
from eyas.operate.children import is_alive
from eyas.operate.configs import find_config
from eyas.operate.keys import server_api_key
from eyas.workspace import RunFolder
from tests.target.tiny_target import write_target

VERBS = [
    "adopt",
    "probe-server",
    "control",
    "run",
    "prepare",
    "generate",
    "merge",
    "extract",
    "train",
    "export",
    "bench",
    "engine",
    "plan",
    "status",
    "watch",
    "report",
]


def test_help_names_every_verb_and_every_verb_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert re.search(rf"^    {verb}\s", text, re.MULTILINE)
        assert callable(getattr(verbs, f"{verb.replace('-', '_')}_verb"))
    assert "130 interrupted" in text


def test_help_starts_without_the_heavy_libraries() -> None:
    heavy = "{'torch', 'transformers', 'prefect'}"
    code = f"import sys; from eyas.operate.cli import make_parser; make_parser(); print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_run_folder_without_a_name_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "a\0b"):
        with pytest.raises(SystemExit) as left:
            cli.main(["status", "--run", name])
        assert left.value.code == 2
        assert "wanted the name of a folder" in capsys.readouterr().err


def test_a_preset_goes_by_its_name_and_a_file_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a checkout there is no deployments/presets."""
    monkeypatch.chdir(tmp_path)
    assert find_config(Path("local-smollm2-quick")).is_file()
    assert find_config(Path("kimi-k2.5-blackwell")).is_file(), "its dot begins no suffix"
    assert find_config(Path("my.yaml")) == Path("my.yaml")
    (tmp_path / "local-smollm2-quick").write_text("{}")
    assert find_config(Path("local-smollm2-quick")) == Path("local-smollm2-quick"), "one's own file comes first"
    with pytest.raises(ConfigError, match=r"neither a file nor a preset; presets are .*local-smollm2-default"):
        find_config(Path("local-smollm2"))


def test_unknown_verb_is_bad_input() -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["fly"])
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EyasError("it broke"), 1),
        (TooManyRejects("too many"), 3),
        (KeyboardInterrupt(), 130),
        (OSError(errno.EIO, "Input/output error", "/a/file"), 1),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace, api_key: str) -> int:
        raise error

    monkeypatch.setattr(verbs, "status_verb", fail)
    assert cli.main(["status", "--run", "my run"]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    if code == 130:
        assert "eyas status --run 'my run'" in lines[0]


def test_status_as_json_is_for_programs(finished_run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--run", str(finished_run.root), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["state"] == "done"
    assert [phase["phase"] for phase in status["phases"]] == ["prepare", "generate", "merge", "extract", "train", "bench"]
    for phase in status["phases"]:
        counts = phase["counts"]
        assert counts["in"] == counts["done"] + counts["rejected"] + counts["pending"]


def test_status_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--run", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_key_comes_from_the_environment_or_the_file(tmp_path: Path, config_file: object) -> None:
    from eyas.config import load_config

    key_file = tmp_path / "key"
    key_file.write_text("from-file\n")
    config = load_config(config_file(server__api_key_file=str(key_file)))  # type: ignore[operator]
    assert server_api_key(config, "") == "from-file"
    assert server_api_key(config, "from-environment") == "from-environment"


SLEEPY = """
import sys
from pathlib import Path
from eyas.operate import pipeline, cli
from eyas.operate.children import child_process, wait_for

def sleepy(work):
    with child_process([sys.executable, "-c", "import time; time.sleep(600)"], log=Path(sys.argv[-1] + ".log"), grace_s=5) as child:
        Path(sys.argv[-1]).write_text(str(child.pid))
        wait_for(child, lambda: None)

pipeline._STEPS["prepare"] = sleepy
sys.exit(cli.main(sys.argv[1:-1]))
"""


@pytest.mark.parametrize(
    ("at_start", "number"),
    [(signal.SIG_DFL, signal.SIGTERM), (signal.SIG_IGN, signal.SIGTERM), (signal.SIG_DFL, signal.SIGHUP)],
    ids=["in front", "behind a shell's &", "its terminal closes"],
)
def test_interrupt_ends_children_and_says_how_to_go_on(
    config_file: object, tmp_path: Path, at_start: signal.Handlers, number: signal.Signals
) -> None:
    note, run = tmp_path / "child.pid", tmp_path / "run"
    words = ["prepare", "--config", str(config_file()), "--run", str(run)]  # type: ignore[operator]
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPY, *words, str(note)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        preexec_fn=lambda: (signal.signal(signal.SIGINT, at_start), signal.signal(signal.SIGHUP, signal.SIG_DFL)),  # not nohup's
    )
    deadline = time.monotonic() + 240
    while not (note.exists() and note.read_text()):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)  # which the command line turns into a SIGINT of its own
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert f"To continue: eyas prepare --config {words[2]} --run {run}" in err
    assert "Traceback" not in err
    assert not is_alive(int(note.read_text()))


def test_making_prompts_for_foreign_servers_loads_no_torch(config_file: Callable[..., Path], tmp_path: Path) -> None:
    program = "import sys; from eyas.operate import cli; code = cli.main(sys.argv[1:]); print(code, 'torch._C' in sys.modules)"
    hidden = {"source": "sglang", "urls": ["http://127.0.0.1:1"], "sink": "/states"}
    config = config_file(target={"model": str(write_target(tmp_path / "chat"))}, hidden=hidden)
    words = ["prepare", "--config", str(config), "--run", str(tmp_path / "run")]
    result = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 False", result.stderr
