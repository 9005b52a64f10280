"""The merge keeps every good record, names every bad one, and its bytes depend on nothing but its inputs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from eyas.errors import ArtifactError, ConfigError, GateError, TooManyRejects
from eyas.manifest import verify_manifest
from eyas.merging.merge import merge
from tests.merging.responses import VOCAB_SIZE, Responses, make_row

OUTPUTS = ("tokens.parquet", "order.parquet", "heldout.parquet", "vocab_map.safetensors", "rejects.jsonl")


def merged_bytes(responses: Responses) -> dict[str, bytes]:
    return {name: (responses.run.merged / name).read_bytes() for name in OUTPUTS}


def rejects_of(responses: Responses) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (responses.run.merged / "rejects.jsonl").read_bytes().split(b"\n") if line]


def test_every_record_comes_out_once_with_its_own_ids_and_mask(responses: Responses) -> None:
    rows = {row["id"]: row for name in ("a", "b") for row in (make_row(n, name, generated=5 + n % 40) for n in range(150))}
    for name in ("a", "b"):
        responses.write(name, [row for row in rows.values() if row["dataset"] == name])
    manifest = merge(responses.run, responses.config("a", "b"))
    table = pq.read_table(responses.run.merged / "tokens.parquet").to_pylist()
    assert [row["id"] for row in table] == sorted(rows)
    for row in table:
        source = rows[row["id"]]
        assert row == {key: source[key] for key in ("id", "dataset", "split", "input_ids", "loss_mask")}
    order = pq.read_table(responses.run.merged / "order.parquet")
    assert order["position"].to_pylist() == list(range(270))
    assert sorted(order["id"].to_pylist()) == sorted(key for key, row in rows.items() if row["split"] == "train")
    heldout = pq.read_table(responses.run.merged / "heldout.parquet")["id"].to_pylist()
    assert sorted(heldout) == sorted(key for key, row in rows.items() if row["split"] == "heldout")
    assert manifest.counts.model_dump(by_alias=True) == {"in": 300, "done": 300, "rejected": 0, "pending": 0}
    assert verify_manifest(responses.run.merged) == manifest


def test_the_order_is_shuffled_and_follows_the_seed(responses: Responses) -> None:
    responses.write("a", [make_row(n) for n in range(200)])
    orders = []
    for seed in (0, 0, 1):
        merge(responses.run, responses.config(merging={"seed": seed}))
        orders.append(pq.read_table(responses.run.merged / "order.parquet")["id"].to_pylist())
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])
    ranks = np.argsort(np.argsort(orders[0]))
    assert abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) < 0.2


def test_bytes_do_not_depend_on_memory_workers_or_blocks(responses: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row(n, generated=200 + n % 900) for n in range(3000)]
    rows[17] = {**rows[5], "split": "heldout"}  # a doubled id: the first stays, whatever the buckets
    responses.write("a", rows)
    merge(responses.run, responses.config())
    wanted = merged_bytes(responses)
    monkeypatch.setattr("eyas.merging.blocks._INLINE_BYTES", 0)
    for memory_bytes, workers in ((1 << 20, 1), (4 << 20, 2)):
        (responses.run.merged / "manifest.json").unlink()
        merge(responses.run, responses.config(merging={"memory_bytes": memory_bytes, "workers": workers}))
        assert merged_bytes(responses) == wanted


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("bad_id", {"id": "XYZ"}),
        ("bad_id", {"id": 7}),
        ("wrong_dataset", {"dataset": "b"}),
        ("bad_split", {"split": "test"}),
        ("bad_finish_reason", {"finish_reason": "abort"}),
        ("bad_ids", {"input_ids": []}),
        ("bad_ids", {"input_ids": [1.0] * 26}),
        ("bad_ids", {"input_ids": [True] * 26}),
        ("bad_ids", {"input_ids": [1, None] * 13}),
        ("bad_ids", {"input_ids": "1,2"}),
        ("id_out_of_range", {"input_ids": [VOCAB_SIZE] + [7] * 25}),
        ("id_out_of_range", {"input_ids": [-1] + [7] * 25}),
        ("id_out_of_range", {"input_ids": [2**40] + [7] * 25}),
        ("bad_prompt_tokens", {"prompt_tokens": 0}),
        ("bad_prompt_tokens", {"prompt_tokens": 27}),
        ("bad_prompt_tokens", {"prompt_tokens": 6.0}),
        ("mask_length", {"loss_mask": [0] * 6 + [1] * 19}),
        ("mask_length", {"loss_mask": None}),
        ("mask_misaligned", {"loss_mask": [0] * 5 + [1] * 21}),
        ("mask_misaligned", {"loss_mask": [0] * 26}),
        ("mask_misaligned", {"loss_mask": [0] * 6 + [2] * 20}),
    ],
)
def test_a_bad_record_is_named_with_line_and_reason(responses: Responses, reason: str, changes: dict[str, Any]) -> None:
    responses.write("a", [make_row(1), {**make_row(2), **changes}, make_row(3)])
    manifest = merge(responses.run, responses.config())
    assert manifest.rejected_by_reason == {reason: 1}
    (reject,) = rejects_of(responses)
    assert reject["where"] == "responses/a/tokenized_data.jsonl:2"
    assert pq.read_metadata(responses.run.merged / "tokens.parquet").num_rows == 2


def test_a_mask_that_slid_into_another_turn_or_was_not_shifted_with_its_ids_is_a_reject(responses: Responses) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3024 and https://github.com/sgl-project/SpecForge/issues/885."""
    slid = {**make_row(2), "loss_mask": [0] * 8 + [1] * 18}
    shifted = {**make_row(3), "loss_mask": [0] * 5 + [1] * 20 + [0]}
    responses.write("a", [make_row(1), slid, shifted])
    assert merge(responses.run, responses.config()).rejected_by_reason == {"mask_misaligned": 2}
    assert "loss_mask[6] is 0, wanted 1: 0 on the 6 prompt ids" in rejects_of(responses)[0]["detail"]


def test_lines_that_are_no_objects_are_rejects(responses: Responses) -> None:
    bad = [b"null", b"[1]", b'{"id":"7","te', b"\xe2\x82", b'{"id":1}{"id":2}', b'{"id": NaN}']
    responses.write("a", [make_row(1), *bad, make_row(2)])  # type: ignore[list-item]
    manifest = merge(responses.run, responses.config())
    assert manifest.counts.done == 2
    assert manifest.rejected_by_reason == {"not_json": 6}


def test_lines_are_split_on_lf_only(responses: Responses) -> None:
    """https://github.com/bytedance/deer-flow/pull/5423: U+2028, U+2029 and U+0085 inside a string end no line."""
    rows = [{**make_row(n), "note": "a\u2028b\u2029c\u0085d"} for n in range(5)]
    content = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    responses.write_bytes("a", content.replace(b"\n", b"\n\n", 2).removesuffix(b"\n"), 5)
    assert merge(responses.run, responses.config()).counts.done == 5


def test_one_huge_line_is_a_reject_and_its_neighbours_live(responses: Responses) -> None:
    """https://github.com/apache/arrow/issues/7835: one object larger than a reader's block."""
    huge = {**make_row(2), "note": "x" * 20_000_000}
    responses.write("a", [make_row(1), huge, make_row(3)])
    manifest = merge(responses.run, responses.config(merging={"max_line_bytes": 1 << 20}))
    assert manifest.rejected_by_reason == {"line_too_long": 1}
    assert rejects_of(responses)[0]["id"] == huge["id"]
    assert merge(responses.run, responses.config(merging={"max_line_bytes": 64 << 20})).counts.done == 3


def test_the_length_cap_comes_before_the_check_for_supervised_tokens(responses: Responses) -> None:
    """https://github.com/verl-project/verl/issues/785: truncation that leaves only prompt must not reach training."""
    responses.write(
        "a", [make_row(1, prompt=20, generated=20), make_row(2, prompt=15, generated=2), make_row(3, prompt=4, generated=9)]
    )
    manifest = merge(responses.run, responses.config(merging={"max_tokens": 16}))
    assert manifest.rejected_by_reason == {"no_supervised_token": 2}
    (row,) = pq.read_table(responses.run.merged / "tokens.parquet").to_pylist()
    assert row["input_ids"] == make_row(3, prompt=4, generated=9)["input_ids"]
    manifest = merge(responses.run, responses.config(merging={"max_tokens": 32}))
    rows = pq.read_table(responses.run.merged / "tokens.parquet").to_pylist()
    assert sorted(len(row["input_ids"]) for row in rows) == [13, 17, 32]
    assert manifest.figures["cut_by_max_tokens"] == 1


def test_a_dataset_without_any_supervised_token_stops_the_stage(responses: Responses) -> None:
    """https://github.com/marin-community/marin/issues/7237: an all-zero mask, and no message."""
    responses.write("a", [make_row(n) for n in range(3)])
    responses.write("b", [{**make_row(n, "b"), "loss_mask": [0] * 26} for n in range(3)])
    with pytest.raises(GateError, match="dataset b: none of its 3 responses"):
        merge(responses.run, responses.config("a", "b"))
    assert not (responses.run.merged / "manifest.json").exists()


def test_a_doubled_id_keeps_the_first_in_order_of_datasets(responses: Responses) -> None:
    twin = {**make_row(1), "dataset": "b", "input_ids": [9] * 26}
    responses.write("a", [make_row(1), make_row(2), make_row(2)])
    responses.write("b", [twin, make_row(3, "b")])
    manifest = merge(responses.run, responses.config("a", "b"))
    assert manifest.rejected_by_reason == {"duplicate_id": 2}
    assert {reject["where"] for reject in rejects_of(responses)} == {
        "responses/a/tokenized_data.jsonl:3",
        "responses/b/tokenized_data.jsonl:1",
    }
    rows = {row["id"]: row for row in pq.read_table(responses.run.merged / "tokens.parquet").to_pylist()}
    assert rows[make_row(1)["id"]]["input_ids"] == make_row(1)["input_ids"]


def test_mixture_weights_repeat_and_leave_out(responses: Responses) -> None:
    for name in ("a", "b", "c"):
        responses.write(name, [make_row(n, name) for n in range(200)])
    mixture = {"a": 2.5, "b": 0.0}
    manifest = merge(responses.run, responses.config("a", "b", "c", merging={"mixture": mixture}))
    copies = Counter(pq.read_table(responses.run.merged / "order.parquet")["id"].to_pylist())
    per_dataset = {name: [copies[make_row(n, name)["id"]] for n in range(200) if n % 10] for name in ("a", "b", "c")}
    assert set(per_dataset["a"]) == {2, 3}
    assert 2.4 < np.mean(per_dataset["a"]) < 2.6
    assert set(per_dataset["b"]) == {0}
    assert set(per_dataset["c"]) == {1}
    assert manifest.figures["order_entries"] == copies.total()
    with pytest.raises(ConfigError, match="mixture names d"):
        merge(responses.run, responses.config("a", merging={"mixture": {"d": 1.0}}))


def test_the_vocabulary_is_the_most_frequent_generated_ids_of_the_training_split(responses: Responses) -> None:
    rows = [make_row(n, generated=60) for n in range(60)]
    responses.write("a", rows)
    manifest = merge(responses.run, responses.config(merging={"draft_vocab_size": 32}))
    counts: Counter[int] = Counter()
    for row in rows:
        if row["split"] == "train":
            counts.update(row["input_ids"][row["prompt_tokens"] :])
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: (-counts[token], token))
    wanted = sorted({2, *[token for token in ranked if token != 2][:31]})  # 2 ends a turn: always in
    tensors = load_file(responses.run.merged / "vocab_map.safetensors")
    assert (np.arange(32) + tensors["d2t"]).tolist() == wanted
    assert np.flatnonzero(tensors["t2d"]).tolist() == wanted
    assert manifest.figures["coverage"]["train"] == pytest.approx(sum(counts[token] for token in wanted) / counts.total())


def test_an_unchanged_merge_is_not_done_again_and_a_damaged_one_is(responses: Responses) -> None:
    responses.write("a", [make_row(n) for n in range(20)])
    first = merge(responses.run, responses.config())
    assert merge(responses.run, responses.config()) == first
    wanted = merged_bytes(responses)
    (responses.run.merged / "order.parquet").write_bytes(wanted["order.parquet"][:-1])
    merge(responses.run, responses.config())
    assert merged_bytes(responses) == wanted


def test_unfinished_or_damaged_responses_are_refused(responses: Responses) -> None:
    responses.write("a", [make_row(1)], pending=1)
    with pytest.raises(GateError, match="1 of 2 pending"):
        merge(responses.run, responses.config())
    responses.write("a", [make_row(1), make_row(2)])
    path = responses.run.responses("a") / "tokenized_data.jsonl"
    path.write_bytes(path.read_bytes().replace(b"stop", b"left"))
    with pytest.raises(ArtifactError, match="differs from the digest"):
        merge(responses.run, responses.config())


def test_too_many_rejects_end_with_exit_code_3_after_everything_was_written(responses: Responses) -> None:
    responses.write("a", [make_row(1), {**make_row(2), "split": "x"}])
    with pytest.raises(TooManyRejects, match="1 of 2 records"):
        merge(responses.run, responses.config(merging={"reject_limit": 0.1}))
    assert verify_manifest(responses.run.merged).counts.done == 1
