"""Files of a run that hold something of another shape: one clear line or a smaller report, never a traceback."""

from __future__ import annotations

import json

import pytest

from eyas.config import parse_config
from eyas.errors import ConfigError
from eyas.operate import cli
from eyas.operate.report import write_report
from eyas.operate.status import read_status
from eyas.workspace import RunFolder


@pytest.mark.parametrize("text", ["[]", '{"config": {}}', '{"config": 3}', "null"])
@pytest.mark.parametrize("verb", ["status", "report", "plan"])
def test_a_run_json_of_another_shape_is_bad_input(
    finished_run: RunFolder, verb: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run.run_json.write_text(text)
    code = cli.main([verb, "--run", str(finished_run.root)])
    assert code == 2 or (verb == "plan" and text == '{"config": {}}'), "an empty config is the default one"
    if code == 2:
        assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize("plan", [{"phases": 3}, {"phases": [4]}, {"phases": [{}]}, {"phases": None}])
def test_a_plan_of_another_shape_knows_nothing(finished_run: RunFolder, plan: object) -> None:
    finished_run.plan_json.write_text(json.dumps(plan))
    assert read_status(finished_run.root).state == "done"


def test_a_report_leaves_out_what_it_cannot_read(finished_run: RunFolder) -> None:
    prompts = next((finished_run.root / "prompts").glob("*/prompts.parquet"))
    prompts.write_bytes(prompts.read_bytes()[:100])
    (finished_run.draft / "metrics.jsonl").write_text('[]\n3\n{"kind": "tr')
    _, html = write_report(finished_run)
    assert "damaged" in html.read_text()


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a value holds '\\ud800'"):
        parse_config({"name": "\ud800x"}, where="here")
