"""What a later phase would refuse, a flow refuses before its first: in the words of the CLI, and nothing is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.config import RunConfig, parse_config
from eyas.errors import ConfigError
from eyas.operate import cli
from flows.generate import generate
from flows.pipeline import pipeline
from tests.prefect.test_pipeline import sections, task_runs
from tests.sglang.tiny import build_target


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"how much is {n} and {n}?"}) + "\n" for n in range(4)))
    datasets = [{"name": "B1", "source": f"file:{rows}", "max_new_tokens": 20}]
    return {
        "target": {"model": str(build_target(tmp_path / "target"))},
        "prompts": {"datasets": datasets, "decontaminate_against": []},
        "merging": {"draft_vocab_size": 64},
        "benchmark": {"sets": ["heldout"]},
    }


def config_of(raw: dict[str, Any]) -> RunConfig:
    return parse_config(raw, where="test")


async def refusal(flow_state: Any) -> ConfigError:
    assert flow_state.is_failed()
    error = await flow_state.aresult(raise_on_failure=False)
    assert isinstance(error, ConfigError), error
    assert str(error) in flow_state.message, "the run's page says it"
    return error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merging": {"draft_vocab_size": 1_000_000}}, "merging.draft_vocab_size is 1000000"),
        ({"hidden": {"source": "sglang"}}, "hidden.source"),
        ({"draft": {"wandb_project": "eyas"}}, "draft.wandb_project wants the package wandb"),
        ({"benchmark": {"sets": ["file:/nowhere/questions.jsonl"]}}, "/nowhere/questions.jsonl does not exist"),
    ],
    ids=["phase 3", "phase 4", "phase 5", "phase 6"],
)
async def test_what_a_later_phase_would_refuse_is_refused_first_as_the_cli_does(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {**raw, **changes}
    run = tmp_path / "runs" / "refused"
    state = await pipeline(run=str(run), **sections(config_of(wrong)), return_state=True)
    error = await refusal(state)
    assert said in str(error)
    assert not list(run.glob("*.json")), "nothing was begun"
    assert not await task_runs(state.state_details.flow_run_id, wanted=0)

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(wrong))
    words = ["run", "--no-prefect", "--config", str(tmp_path / "config.yaml"), "--run", str(tmp_path / "by-cli")]
    assert cli.main(words) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert without_sizes(printed) == without_sizes(f"error: {error}").replace(str(run), str(tmp_path / "by-cli"))


async def test_a_phase_alone_is_refused_likewise(tmp_path: Path, raw: dict[str, Any]) -> None:
    run = tmp_path / "runs" / "phase"
    assert (await pipeline(run=str(run), **sections(config_of(raw)), until="prepare", return_state=True)).is_completed()
    recorded = (run / "run.json").read_bytes()
    error = await refusal(await generate(run=str(run), settings=["draft.wandb_project=eyas"], return_state=True))
    assert "draft.wandb_project" in str(error)
    assert (run / "run.json").read_bytes() == recorded


def without_sizes(text: str) -> str:
    """Free bytes change from one moment to the next."""
    return re.sub(r"[\d.,]+ (GB|MB|bytes|h)\b", "N", text)
