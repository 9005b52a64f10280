from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.config import RunConfig
from eyas.errors import ConfigError, ServerError
from eyas.prompts.benchsets import STANDARD_SETS
from eyas.speculate.sets import check_set_names, check_sets, load_set, set_name
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


def test_standard_sets_are_called_by_their_names(target: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MT-Bench, HumanEval and BFCL from their packages; GSM8K, MATH-500 and MBPP as the hub publishes their test parts."""
    published: dict[tuple[str, str | None, str], dict[str, object]] = {
        ("openai/gsm8k", "main", "test"): {"question": "Natalia sold 48 clips.", "answer": "#### 72"},
        ("HuggingFaceH4/MATH-500", None, "test"): {"problem": "Convert $(0,3)$.", "solution": "s", "answer": "3", "level": 2},
        ("google-research-datasets/mbpp", "sanitized", "test"): {"task_id": 2, "prompt": "Write a function.", "code": "c"},
    }
    monkeypatch.setattr(
        "datasets.load_dataset", lambda name, subset, *, split, revision, streaming: [published[name, subset, split]] * 3
    )
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    found = {name: load_set(RunFolder(tmp_path), config(prompts_per_set=3), target, name) for name in STANDARD_SETS}
    assert {name: [prompt.id.rsplit("-", 1)[0] for prompt in prompts] for name, prompts in found.items()} == {
        name: [name] * 3 for name in ("mt-bench", "humaneval", "bfcl", "gsm8k", "math-500", "mbpp")
    }


def test_a_name_that_is_no_set_is_refused_with_those_that_are(target: TargetSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gsm-8k' is none of bfcl, gsm8k, humaneval, math-500, mbpp, mt-bench"):
        load_set(RunFolder(tmp_path), config(), target, "gsm-8k")


def test_offline_the_hub_is_refused_before_the_long_phases_with_what_to_do(
    target: TargetSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Days after the start is no time to find that a benchmark set cannot be fetched."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = r"cannot be fetched: HF_HUB_OFFLINE .* is set; unset it, or download the set .* file:PATH"
    with pytest.raises(ConfigError, match=message):
        check_sets(config(sets=["mt-bench", "gsm8k"]), target)
    with pytest.raises(ConfigError, match=message):
        load_set(RunFolder(tmp_path), config(), target, "math-500")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    check_sets(config(sets=["mt-bench", "gsm8k"]), target)


def test_a_hub_that_does_not_answer_is_told_with_what_to_do(
    target: TargetSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load_dataset(*names: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with pytest.raises(ServerError, match=r"hub:openai/gsm8k broke off after row 0: .*; check the network, or download it"):
        load_set(RunFolder(tmp_path), config(), target, "gsm8k")


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
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    prompts = load_set(RunFolder(tmp_path), config(prompts_per_set=2), target, "hub:openai/gsm8k,main,test")
    assert [prompt.id for prompt in prompts] == ["gsm8k-0", "gsm8k-2"]
    load_set(RunFolder(tmp_path), config(), target, "hub:HuggingFaceH4/MATH-500,,test")
    assert asked == [("openai/gsm8k", "main", "test"), ("HuggingFaceH4/MATH-500", None, "test")]
