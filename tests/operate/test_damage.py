"""Files of a run that hold something of another shape: one clear line or a smaller report, never a traceback."""

from __future__ import annotations

import json
import math

import pytest

from eyas.config import parse_config
from eyas.errors import ConfigError
from eyas.files import read_json, write_json
from eyas.operate import cli
from eyas.operate.report import write_report
from eyas.operate.series import metrics
from eyas.operate.status import read_status
from eyas.workspace import RunFolder

BAD_CONFIGS = ["[]", '{"config": {}}', '{"config": 3}', "null"]


@pytest.mark.parametrize("text", BAD_CONFIGS)
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


@pytest.mark.parametrize("name", [None, 3, "../other/prompts/B1"])
@pytest.mark.parametrize("verb", ["status", "report"])
def test_a_dataset_without_a_name_is_a_damaged_run(
    finished_run: RunFolder, verb: str, name: object, capsys: pytest.CaptureFixture[str]
) -> None:
    about = read_json(finished_run.run_json)
    about["config"]["prompts"]["datasets"][0]["name"] = name
    write_json(finished_run.run_json, about)
    assert cli.main([verb, "--run", str(finished_run.root)]) == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", ['"loss": null, "step": 10', '"loss": NaN, "step": 10', '"loss": 1.5, "step": 1e400', '"loss": 1.5']
)
def test_a_row_of_metrics_without_its_figures_is_left_out(finished_run: RunFolder, row: str) -> None:
    with open(finished_run.draft / "metrics.jsonl", "a") as file:
        file.write(f'{{"kind": "train", {row}}}\n{{"kind": "heldout", "step": 10, "accept_length": null}}\n')
    trained, replayed = metrics(finished_run)
    assert all(math.isfinite(item["loss"]) and item["step"] <= 200 for item in trained)
    assert all(isinstance(item["accept_length"], float) for item in replayed)
    write_report(finished_run)


@pytest.mark.parametrize("change", [(b'"overall"', b'"0verall"'), (b"1.", b"9.")])
def test_results_of_equal_size_that_are_not_those_of_the_benchmark_are_shown_nowhere(
    finished_run: RunFolder, change: tuple[bytes, bytes]
) -> None:
    path = finished_run.benchmark / "results.json"
    path.write_bytes(path.read_bytes().replace(*change))
    status = read_status(finished_run.root)
    assert (status.phases[-1].state, status.results) == ("damaged", {})
    assert "Speed-up" not in write_report(finished_run)[1].read_text()


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a value holds '\\ud800'"):
        parse_config({"name": "\ud800x"}, where="here")
