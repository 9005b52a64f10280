from __future__ import annotations

import itertools
import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError, TooManyRejects
from eyas.manifest import Manifest, load_manifest, verify_manifest
from eyas.progress import Progress
from eyas.prompts import candidates, prepare
from eyas.prompts.config import DatasetConfig, PromptsConfig
from eyas.prompts.preparation import CONTEXT_MARGIN
from eyas.prompts.store import SCHEMA, read_prompts
from eyas.target.config import TargetConfig
from eyas.workspace import RunFolder
from tests.prompts.conftest import chat, read_rejects, write_rows
from tests.target.tiny_target import CHATML, QWEN3, write_target

_WORDS = [f"word{index}" for index in range(3000)]


def _rows(seed: int, num_rows: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        chat(*(" ".join(rng.choices(_WORDS, k=rng.randint(4, 25))) for _ in range(rng.choice([1, 2, 3])))) for _ in range(num_rows)
    ]


def test_prompts_have_the_documented_schema_order_and_content(prepared, tmp_path: Path, target: Path) -> None:
    manifest, prompts, _ = prepared(_rows(0, 80), dataset={"max_new_tokens": 500})
    path = tmp_path / "run" / "prompts" / "B" / "prompts.parquet"
    assert pq.read_schema(path).equals(SCHEMA)
    ids = [prompt["id"] for prompt in prompts]
    assert ids == sorted(ids)
    assert len(set(ids)) == 80
    assert all(len(prompt["id"]) == len(prompt["conversation"]) == 32 for prompt in prompts)
    assert {prompt["split"] for prompt in prompts} == {"train", "heldout"}
    assert all(json.loads(prompt["messages"])[-1]["role"] == "user" for prompt in prompts)
    assert manifest.counts.num_in == manifest.counts.done == 80
    verify_manifest(tmp_path / "run" / "prompts" / "B")


def test_the_time_that_is_told_includes_reading_the_rows(prepared, tmp_path: Path) -> None:
    manifest, _, _ = prepared(_rows(0, 20))
    (read,) = (tmp_path / "run" / "prompts" / "B").glob("candidates-*/manifest.json")
    assert manifest.started_at == load_manifest(read.parent).started_at


def test_a_response_never_outgrows_the_context(prepared) -> None:
    _, prompts, _ = prepared(
        [chat("word " * count) for count in (10, 150, 350)], dataset={"max_new_tokens": 10_240}, min_response_room=100
    )
    for prompt in prompts:
        assert len(prompt["input_ids"]) + prompt["max_new_tokens"] + CONTEXT_MARGIN == 2048


def test_a_prompt_above_the_limit_is_rejected_with_both_numbers(prepared) -> None:
    _, prompts, rejects = prepared([chat("word " * 40), chat("hi")], max_prompt_tokens=60)
    assert len(prompts) == 1
    assert rejects[0]["reason"] == "too_long"
    assert "at most 60" in rejects[0]["detail"]
    assert len(rejects[0]["id"]) == 32


def test_nothing_vanishes_and_every_reject_says_where(prepared) -> None:
    rows: list[Any] = _rows(1, 300)
    for index in range(0, 300, 7):
        rows[index] = [b"{broken", {"conversations": []}, {"x": 1}, rows[index - 1]][index % 4]
    manifest, prompts, rejects = prepared(rows)
    assert len(prompts) + len(rejects) == manifest.counts.num_in == 300
    assert manifest.rejected_by_reason == {
        reason: sum(reject["reason"] == reason for reject in rejects) for reason in manifest.rejected_by_reason
    }
    assert {reject["where"].split(":")[0] for reject in rejects} == {"rows.jsonl"}


def test_a_prompt_never_holds_its_answer(prepared) -> None:
    _, prompts, _ = prepared([chat("a", "b", "c", "d"), chat("e"), chat("f", "g")])
    roles = [[turn["role"] for turn in json.loads(prompt["messages"])] for prompt in prompts]
    assert sorted(roles) == [["user"], ["user"], ["user", "assistant", "user"]]


def test_every_turn_makes_prompts_of_one_conversation_in_one_split(prepared) -> None:
    rows = [chat(*(f"{seed} turn {turn} of many" for turn in range(6))) for seed in range(40)]
    _, prompts, rejects = prepared(rows, dataset={"every_turn": True}, heldout_share=0.5)
    assert (len(prompts), rejects) == (120, [])
    splits: dict[str, set[str]] = {}
    for prompt in prompts:
        splits.setdefault(prompt["conversation"], set()).add(prompt["split"])
    assert len(splits) == 40
    assert all(len(found) == 1 for found in splits.values())
    assert {split for found in splits.values() for split in found} == {"train", "heldout"}


def test_duplicates_are_removed_across_datasets_in_the_configs_order(tmp_path: Path, make_config) -> None:
    text = " ".join(_WORDS[:60])
    first = write_rows(tmp_path / "a.jsonl", [chat("equal prompt"), chat(text), chat("only in a")])
    second = write_rows(
        tmp_path / "b.jsonl", [chat("equal prompt", "another answer"), chat(text + " and a little more"), chat("only in b")]
    )
    run = RunFolder(tmp_path / "run")
    manifests = prepare.prepare(run, make_config({"A": first, "B": second}))
    assert manifests["A"].rejected_by_reason == {}
    assert manifests["B"].rejected_by_reason == {"duplicate": 1, "near_duplicate": 1}
    assert all("A a.jsonl:" in reject["detail"] for reject in read_rejects(run, "B"))
    swapped = prepare.prepare(RunFolder(tmp_path / "run2"), make_config({"B": second, "A": first}))
    assert swapped["A"].rejected_by_reason == {"duplicate": 1, "near_duplicate": 1}


def test_near_duplicates_stay_where_the_config_says_so(prepared) -> None:
    text = " ".join(_WORDS[:60])
    _, prompts, _ = prepared([chat(text), chat(text + " more")], near_duplicates=False)
    assert len(prompts) == 2


def test_benchmark_prompts_are_not_trained_on(tmp_path: Path, prepared) -> None:
    bench = " ".join(_WORDS[100:130])
    file = write_rows(tmp_path / "bench.jsonl", [{"prompt": bench}, {"prompt": "a short one of six words"}])
    rows = [chat(f"Please: {bench.upper()}!"), chat("A short one, of six words?"), chat(" ".join(_WORDS[100:112])), chat("clean")]
    manifest, prompts, rejects = prepared(rows, decontaminate_against=[f"file:{file}"])
    assert manifest.rejected_by_reason == {"contaminated": 2}
    assert len(prompts) == 2
    assert all(f"file:{file} #" in reject["detail"] for reject in rejects)


def test_a_smaller_quota_or_subsample_is_a_subset(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(2, 200))
    kept = []
    for number, (quota, subsample) in enumerate([(0, 1.0), (120, 1.0), (120, 0.5), (120, 0.1)]):
        run = RunFolder(tmp_path / f"run{number}")
        manifest = prepare.prepare(run, make_config({"B": {"source": f"file:{path}", "quota": quota}}, subsample=subsample))["B"]
        assert manifest.counts.num_in == 200
        kept.append({prompt["id"] for prompt in read_prompts(run.prompts("B"))})
    assert [len(ids) for ids in kept] == [200, 120, 60, 12]
    assert all(small < large for large, small in itertools.pairwise(kept))


def test_subsampling_keeps_each_datasets_share(tmp_path: Path, make_config) -> None:
    paths = {
        name: write_rows(tmp_path / f"{name}.jsonl", _rows(seed, count))
        for seed, (name, count) in enumerate({"A": 40, "B": 120, "C": 10}.items())
    }
    manifests = prepare.prepare(RunFolder(tmp_path / "run"), make_config(paths, subsample=0.25))
    assert [manifest.counts.done for manifest in manifests.values()] == [10, 30, 2]


def test_another_seed_chooses_others(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(2, 100))
    chosen = []
    for seed in (0, 1):
        run = RunFolder(tmp_path / f"run{seed}")
        prepare.prepare(run, make_config({"B": {"source": f"file:{path}", "quota": 30}}, seed=seed))
        chosen.append({prompt["id"] for prompt in read_prompts(run.prompts("B"))})
    assert chosen[0] != chosen[1]


def test_finished_work_is_kept_and_damaged_work_is_done_again(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(3, 60))
    run, config = RunFolder(tmp_path / "run"), make_config({"B": path})
    first = prepare.prepare(run, config)["B"]
    file = run.prompts("B") / "prompts.parquet"
    before = file.stat().st_mtime_ns
    assert prepare.prepare(run, config)["B"] == first
    assert file.stat().st_mtime_ns == before
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    prepare.prepare(run, config)
    assert file.read_bytes() == whole
    next(run.prompts("B").glob("candidates-*/candidates.arrow")).unlink()
    prepare.prepare(run, config)
    assert file.read_bytes() == whole


def _fingerprint(tmp_path: Path, name: str, config: Any) -> str:
    return next(iter(prepare.prepare(RunFolder(tmp_path / name), config).values())).fingerprint


_CHANGES: dict[str, dict[str, Any]] = {
    "dataset": {
        "name": "C",
        "source": "OTHER",
        "converter": "sharegpt",
        "max_rows": 19,
        "fields": {"conversations": "conversations"},
        "quota": 5,
        "max_new_tokens": 77,
        "tools": "text",
        "every_turn": True,
    },
    "prompts": {
        "heldout_share": 0.3,
        "subsample": 0.5,
        "seed": 1,
        "max_row_bytes": 5000,
        "max_prompt_tokens": 100,
        "min_prompt_tokens": 3,
        "min_response_room": 65,
        "same_role_turns": "reject",
        "control_tokens": "keep",
        "near_duplicates": False,
        "near_duplicate_threshold": 0.7,
        "decontaminate_against": ["BENCH"],
        "contamination_ngram": 12,
        "languages": ["en"],
    },
    "target": {"chat_template_kwargs": {"x": 1}, "context_length": 1000, "reasoning": "qwen3"},
}
_KEEPS: dict[str, dict[str, Any]] = {
    "dataset": {"license": "MIT", "split": "test", "subset": "s", "revision": "abc"},  # the last three are a hub's
    "prompts": {"reject_limit": 0.9},
    "target": {"revision": "abc", "always_reasons": "no"},
    "generation": {"seed": 9, "max_new_tokens": 50},
    "draft": {"epochs": 9},
}
_ELSEWHERE = {"dataset": set(), "prompts": {"datasets"}, "target": {"model", "remote_code_sha256"}}


def test_every_setting_of_phase_1_is_known_to_change_the_fingerprint_or_not_to() -> None:
    models = {"dataset": DatasetConfig, "prompts": PromptsConfig, "target": TargetConfig}
    for name, model in models.items():
        assert set(model.model_fields) == {*_CHANGES[name], *_KEEPS[name], *_ELSEWHERE[name]}


@pytest.mark.parametrize(
    ("section", "key", "value", "changes"),
    [
        pytest.param(section, key, value, table is _CHANGES, id=f"{section}.{key}")
        for table in (_CHANGES, _KEEPS)
        for section, values in table.items()
        for key, value in values.items()
    ],
)
def test_fingerprint_follows_what_changes_the_bytes_and_nothing_else(
    tmp_path: Path, make_config, section: str, key: str, value: Any, changes: bool
) -> None:
    path, other = (write_rows(tmp_path / f"rows{seed}.jsonl", _rows(seed, 20)) for seed in (4, 5))
    bench = write_rows(tmp_path / "bench.jsonl", [{"prompt": "one two three four five six"}])
    value = f"file:{other}" if value == "OTHER" else [f"file:{bench}"] if value == ["BENCH"] else value
    raw = make_config({"B": path}).model_dump()
    plain = _fingerprint(tmp_path, "one", RunConfig.model_validate(raw))
    (raw["prompts"]["datasets"][0] if section == "dataset" else raw[section])[key] = value
    assert (_fingerprint(tmp_path, "two", RunConfig.model_validate(raw)) != plain) is changes


def test_fingerprint_follows_template_tokenizer_source_and_version_but_not_weights(
    tmp_path: Path, make_config, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(4, 20))
    config = make_config({"B": path})
    seen = [_fingerprint(tmp_path, "a", config)]
    (target / "model.safetensors").write_bytes(bytes(100))
    seen.append(_fingerprint(tmp_path, "b", config))
    assert len(set(seen)) == 1
    (target / "chat_template.jinja").write_text(CHATML.replace("assistant\n'", "assistant\n '"))
    seen.append(_fingerprint(tmp_path, "c", config))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    seen.append(_fingerprint(tmp_path, "t", config))
    write_rows(path, _rows(5, 20))
    seen.append(_fingerprint(tmp_path, "d", config))
    monkeypatch.setattr(candidates, "VERSION", candidates.VERSION + 1)
    seen.append(_fingerprint(tmp_path, "e", config))
    monkeypatch.setattr(prepare, "VERSION", prepare.VERSION + 1)
    seen.append(_fingerprint(tmp_path, "f", config))
    assert len(set(seen)) == len(seen) - 1


def test_a_changed_config_leaves_no_stale_candidates(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(4, 20))
    run = RunFolder(tmp_path / "run")
    prepare.prepare(run, make_config({"B": path}))
    prepare.prepare(run, make_config({"B": path}, same_role_turns="reject"))
    assert len(list(run.prompts("B").glob("candidates-*"))) == 1


_TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]},
        {"role": "tool", "content": "7"},
    ],
    "tools": [{"name": "look", "description": "Looks.", "parameters": {"type": "object"}}],
}


def test_tools_become_text_where_the_template_ignores_them_and_are_counted(prepared) -> None:
    manifest, prompts, _ = prepared([_TOOL_ROW])
    system, _, said, answer = json.loads(prompts[0]["messages"])
    assert manifest.figures["repairs"] == {"tools_as_text": 1}
    assert '{"name":"look","description":"Looks."' in system["content"]
    assert said == {"role": "assistant", "content": 'I look.\n<tool_call>\n{"name":"look","arguments":{"at":1}}\n</tool_call>'}
    assert answer == {"role": "tool", "content": "7"}
    assert prompts[0]["tools"] == "[]"


def test_tools_stay_tools_where_the_template_renders_them(prepared, tmp_path: Path) -> None:
    manifest, prompts, _ = prepared([_TOOL_ROW], model=write_target(tmp_path / "qwen", QWEN3))
    assert manifest.figures["repairs"] == {}
    assert json.loads(prompts[0]["tools"])[0]["function"]["name"] == "look"
    assert [turn["role"] for turn in json.loads(prompts[0]["messages"])] == ["user", "assistant", "tool"]


def test_native_tools_are_rejected_where_the_template_ignores_them(prepared) -> None:
    _, prompts, rejects = prepared([_TOOL_ROW, chat("hi")], dataset={"tools": "native"})
    assert (len(prompts), [reject["reason"] for reject in rejects]) == (1, ["tools_not_rendered"])


def test_system_turns_that_the_template_drops_are_rejected(prepared, tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ '<|im_start|>' + m", "{% if m['role'] == 'system' and not loop.first %}{% continue %}{% endif %}{{ '<|im_start|>' + m"
    )
    middle = {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]}
    _, prompts, rejects = prepared([middle, chat("hi", system="first")], model=write_target(tmp_path / "dropping", template))
    assert [reject["reason"] for reject in rejects] == ["system_in_middle"]
    assert len(prompts) == 1


def test_values_that_are_no_json_are_one_rows_fault(prepared, tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"at": datetime(2026, 1, 2), "x": float("nan")}}}
    turns = [
        {"role": "user", "content": "q", "from": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    table = pa.Table.from_pylist([{"messages": [*turns, {"role": "user", "content": "r"}]}, {"messages": turns[:1]}])
    pq.write_table(table, tmp_path / "rows.parquet")
    _, prompts, rejects = prepared(tmp_path / "rows.parquet")
    assert [reject["reason"] for reject in rejects] == ["bad_value"]
    assert rejects[0]["where"] == "rows.parquet:1"
    assert len(prompts) == 1


def test_fields_map_a_row_without_code(prepared) -> None:
    rows = [{"meta": {"ask": f"question {index}"}, "sys": "Be brief.", "answer": "x"} for index in range(3)]
    _, prompts, _ = prepared(rows, dataset={"fields": {"prompt": "meta.ask", "system": "sys"}})
    assert {json.loads(prompt["messages"])[1]["content"] for prompt in prompts} == {"question 0", "question 1", "question 2"}


def test_languages_filter_rejects_what_is_surely_another(prepared) -> None:
    rows = [
        chat("Please explain to me how the heart of a bird works, and why it beats so fast."),
        chat("Bitte erkläre mir ausführlich, wie das Herz eines Vogels arbeitet und warum es so schnell schlägt."),
        chat("请详细解释鸟类的心脏是如何工作的,以及为什么跳得这么快。"),
        chat("def f(x): return x + 1"),
    ]
    manifest, prompts, _ = prepared(rows, languages=["en"])
    assert manifest.rejected_by_reason == {"language": 2}
    assert len(prompts) == 2


def test_short_prompts_are_filtered_where_the_config_says_so(prepared) -> None:
    rows = [chat("hi"), chat(" ".join(_WORDS[:40]))]
    plain, _, _ = prepared(rows)
    manifest, prompts, rejects = prepared(rows, min_prompt_tokens=60, reject_limit=0.0)
    assert plain.rejected_by_reason == {}
    assert manifest.rejected_by_reason == {"too_short": 1}
    assert manifest.fingerprint != plain.fingerprint
    assert (len(prompts), rejects[0]["where"]) == (1, "rows.jsonl:1")
    assert "min_prompt_tokens is 60" in rejects[0]["detail"]


def test_statistics_describe_the_prompts(prepared) -> None:
    manifest, prompts, _ = prepared(_rows(6, 101))
    lengths = sorted(len(prompt["input_ids"]) for prompt in prompts)
    figures = manifest.figures
    assert figures["tokens"] == {"p50": lengths[50], "p90": lengths[90], "max": lengths[-1], "sum": sum(lengths)}
    for group in figures["histogram"]:
        assert group["prompts"] == sum(group["from"] <= length < group["to"] for length in lengths)
    assert sum(group["prompts"] for group in figures["histogram"]) == 101
    assert figures["splits"]["train"] + figures["splits"]["heldout"] == 101
    assert len(figures["samples"]) == 3
    assert all(sample.startswith("<|im_start|>user") and len(sample) <= 400 for sample in figures["samples"])


def test_progress_is_reported_per_dataset(tmp_path: Path, make_config) -> None:
    seen: list[Progress] = []
    prepare.prepare(RunFolder(tmp_path / "run"), make_config({"B": write_rows(tmp_path / "rows.jsonl", _rows(7, 20))}), seen.append)
    assert any(progress.name == "B" and progress.is_final and progress.done == 20 for progress in seen)


def test_too_many_rejects_end_the_stage_after_everything_is_written(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*_rows(8, 5), *[{"x": index} for index in range(6)]])
    run = RunFolder(tmp_path / "run")
    for _ in range(2):  # and again on finished work
        with pytest.raises(TooManyRejects, match="6 of 11 rows") as refusal:
            prepare.prepare(run, make_config({"B": path}, reject_limit=0.5))
        assert refusal.value.exit_code == 3
        assert load_manifest(run.prompts("B")).counts.done == 5
    assert isinstance(prepare.prepare(run, make_config({"B": path}, reject_limit=0.6))["B"], Manifest)


def test_rows_over_a_quota_are_no_fault(tmp_path: Path, make_config) -> None:
    path = write_rows(tmp_path / "rows.jsonl", _rows(9, 50))
    manifest = prepare.prepare(
        RunFolder(tmp_path / "run"), make_config({"B": {"source": f"file:{path}", "quota": 2}}, reject_limit=0.0)
    )["B"]
    assert manifest.rejected_by_reason == {"over_quota": 48}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"source": "file:/nowhere.jsonl"}, r"/nowhere\.jsonl"),
        ({"source": "nonsense"}, "wanted file:PATH, hub:ID or package:NAME"),
        ({"source": "package:unknown"}, "package:unknown is not known"),
        ({"source": "ROWS", "fields": {"prompt": "absent"}}, "fields.prompt names 'absent'"),
        ({"source": "EMPTY"}, "holds no row"),
    ],
)
def test_an_unusable_source_is_one_clear_line_and_nothing_is_left_half_written(
    tmp_path: Path, make_config, dataset: dict, message: str
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": str(index)} for index in range(150)])
    empty = write_rows(tmp_path / "empty.jsonl", [])
    dataset = {**dataset, "source": {"ROWS": f"file:{rows}", "EMPTY": f"file:{empty}"}.get(dataset["source"], dataset["source"])}
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=message) as refusal:
        prepare.prepare(run, make_config({"B": dataset}))
    assert refusal.value.exit_code == 2
    assert "\n" not in str(refusal.value)
    with pytest.raises(ArtifactError):
        load_manifest(run.prompts("B"))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_an_unknown_dataset_and_an_empty_list_are_named(tmp_path: Path, make_config) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'C' is not in prompts\.datasets \(known: B\)"):
        prepare.prepare_candidates(run, make_config({"B": "x"}), "C")
    with pytest.raises(ConfigError, match=r"prompts\.datasets is empty"):
        prepare.prepare(run, make_config({}))


def test_a_context_without_room_is_refused(tmp_path: Path, make_config) -> None:
    config = make_config({"B": write_rows(tmp_path / "rows.jsonl", _rows(1, 3))}, min_response_room=2048)
    with pytest.raises(ConfigError, match="min_response_room"):
        prepare.prepare(RunFolder(tmp_path / "run"), config)
