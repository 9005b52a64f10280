from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.speculate.sets import check_set_names, load_set, set_name
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder


@pytest.fixture(scope="module")
def target() -> TargetSpec:
    return load_target(TargetConfig())


def config(**benchmark: object) -> RunConfig:
    return RunConfig.model_validate({"benchmark": benchmark})


@pytest.mark.parametrize(
    ("source", "name"), [("heldout", "heldout"), ("package:mt-bench", "mt-bench"), ("file:/a/own.traffic.jsonl", "own")]
)
def test_short_names(source: str, name: str) -> None:
    assert set_name(source) == name


@pytest.mark.parametrize("sources", [["file:/a/own.jsonl", "file:/b/own.jsonl"], ["file:/a/heldout.jsonl"], ["heldout", "heldout"]])
def test_one_name_for_two_sets_is_refused(sources: list[str]) -> None:
    with pytest.raises(ConfigError, match="one name twice"):
        check_set_names(sources)


def test_standard_set_is_sampled_over_its_whole_length(target: TargetSpec, tmp_path: Path) -> None:
    """MT-Bench is sorted by subject: the first ten of its eighty are all writing."""
    prompts = load_set(RunFolder(tmp_path), config(prompts_per_set=8), target, "package:mt-bench")
    assert [prompt.id for prompt in prompts] == [f"mt-bench-{place}" for place in range(0, 80, 10)]
    assert all(prompt.input_ids and prompt.dataset == "mt-bench" for prompt in prompts)


def test_ones_own_traffic_is_a_set(target: TargetSpec, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Question {number}?"}]} for number in range(3)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = load_set(RunFolder(tmp_path), config(), target, f"file:{path}")
    assert [prompt.id for prompt in prompts] == ["own-0", "own-1", "own-2"]


def test_prompt_without_room_for_its_reply_is_refused_by_name(target: TargetSpec, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "word " * 8100}]}))
    with pytest.raises(ConfigError, match=r"long-0 has 8\d\d\d tokens"):
        load_set(RunFolder(tmp_path), config(), target, f"file:{path}")


def test_a_set_of_the_hub_is_read_with_its_subset_and_split(
    target: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GSM8K has no default subset, and a benchmark measures on test, not on train."""
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str, revision: str | None, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        return [{"question": f"How many are {number} and 2?", "answer": "x"} for number in range(4)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    prompts = load_set(RunFolder(tmp_path), config(prompts_per_set=2), target, "hub:openai/gsm8k,main,test")
    assert [prompt.id for prompt in prompts] == ["gsm8k-0", "gsm8k-2"]
    load_set(RunFolder(tmp_path), config(), target, "hub:HuggingFaceH4/MATH-500,,test")
    assert asked == [("openai/gsm8k", "main", "test"), ("HuggingFaceH4/MATH-500", None, "test")]
