"""Extraction stores, for every record, exactly what the target computes, and accounts for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.errors import ArtifactError, ConfigError, GateError, TooManyRejects
from eyas.hidden import extract as extract_module
from eyas.hidden.extract import extract, extract_shard, finish_extraction, plan_shards
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.hidden.store import HiddenStore
from eyas.hidden.store.shard import load_entry, write_entry
from eyas.manifest import verify_manifest
from tests.hidden.tiny import HIDDEN_SIZE, TinyRun, plain_states

SMALL_SHARDS = 1 << 20


def store_bytes(tiny: TinyRun) -> dict[str, bytes]:
    names = [path.name for path in tiny.run.hidden.iterdir() if path.suffix in (".safetensors", ".parquet", ".jsonl")]
    return {name: (tiny.run.hidden / name).read_bytes() for name in sorted(names)}


def test_states_equal_a_plain_forward_of_each_record_alone(tiny: TinyRun) -> None:
    rows = [*tiny.write_random("a", 12), *tiny.write_random("b", 5)]
    manifest = extract(tiny.run, tiny.hidden_config("a", "b"))
    store = HiddenStore(tiny.run.hidden)
    assert store.ids() == sorted(row["id"] for row in rows)
    for row in rows:
        record = store.record(row["id"])
        aux, final = plain_states(tiny.target, row["input_ids"])
        assert record.tokens.tolist() == row["input_ids"]
        assert record.loss_mask.tolist() == row["loss_mask"]
        assert store.num_tokens(row["id"]) == len(row["input_ids"])
        torch.testing.assert_close(record.aux.float(), aux, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(record.final.float(), final, rtol=1e-2, atol=1e-2)
    assert (record.aux.dtype, record.final.dtype) == (torch.bfloat16, torch.bfloat16)
    assert manifest.counts.model_dump(by_alias=True) == {"in": 17, "done": 17, "rejected": 0, "pending": 0}
    assert "2000" < manifest.started_at <= manifest.finished_at
    assert verify_manifest(tiny.run.hidden) == manifest
    assert sorted(store.verify()) == ["shard-a-00000", "shard-b-00000"]


def test_a_shared_head_between_prompts_loses_no_rows(tiny: TinyRun) -> None:
    """https://github.com/vllm-project/vllm/issues/44485: with a prefix cache only the uncached suffix has states."""
    rows = tiny.write_random("a", 2, longest=30)
    head = np.random.default_rng(5).integers(5, 261, 500).tolist()
    for row in rows:
        row["input_ids"] = head + row["input_ids"]
        row["loss_mask"] = [0] * 500 + row["loss_mask"]
        row["prompt_tokens"] += 500
    tiny.write("a", rows)
    extract(tiny.run, tiny.hidden_config("a"))
    store = HiddenStore(tiny.run.hidden)
    for row in rows:
        record = store.record(row["id"])
        assert len(record.aux) == len(record.final) == len(row["input_ids"])
        torch.testing.assert_close(record.final.float(), plain_states(tiny.target, row["input_ids"])[1], rtol=1e-2, atol=1e-2)


def test_shards_by_themselves_give_the_bytes_of_the_whole_run(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_random("a", 30)
    monkeypatch.setattr("eyas.hidden.plan.bytes_per_token", lambda size, codec: 1 << 13)  # about 128 tokens a shard
    config = tiny.hidden_config("a", shard_bytes=SMALL_SHARDS)
    manifest = extract(tiny.run, config)
    wanted = store_bytes(tiny)
    plans = plan_shards(tiny.run, config, "a")
    assert len(plans) > 4
    assert manifest.figures["shards"] == len(plans)
    for path in list(tiny.run.hidden.glob("shard*")):
        path.unlink()
    for plan in [*reversed(plans), plans[0]]:
        assert extract_shard(tiny.run, config, plan).plan == plan.digest
    assert finish_extraction(tiny.run, config).digest() == manifest.digest()
    assert store_bytes(tiny) == wanted


def test_a_finished_store_is_not_touched_and_a_truncated_shard_is_extracted_again(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_random("a", 6)
    tiny.write_random("b", 6)
    config = tiny.hidden_config("a", "b")
    first = extract(tiny.run, config)
    wanted = store_bytes(tiny)
    opened: list[str] = []
    original = extract_module.open_source
    monkeypatch.setattr(extract_module, "open_source", lambda *given: opened.append("x") or original(*given))
    assert extract(tiny.run, config) == first
    assert opened == []
    path = tiny.run.hidden / "shard-b-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArtifactError, match=r"shard-b-00000\.safetensors has"):
        HiddenStore(tiny.run.hidden)
    extract(tiny.run, config)
    assert opened == ["x"]
    assert store_bytes(tiny) == wanted


def test_states_of_another_target_are_found_and_named(tiny: TinyRun) -> None:
    tiny.write_random("a", 4)
    config = tiny.hidden_config("a")
    extract(tiny.run, config)
    entry = load_entry(tiny.run.hidden / "shard-a-00000.json")
    store = HiddenStore(tiny.run.hidden)
    write_entry(tiny.run.hidden, entry.model_copy(update={"kind": "f" * 64}))
    with pytest.raises(ArtifactError, match=r"shard-a-00000\.safetensors holds states of another kind"):
        store.record(entry.ids[0])
    other = tiny.config("a", target={"model": str(tiny.target), "revision": "2"}, hidden=config.hidden.model_dump())
    assert plan_shards(tiny.run, other, "a")[0].digest != plan_shards(tiny.run, config, "a")[0].digest


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)


def test_flipped_bits_are_found_at_the_first_read_and_the_shard_is_extracted_again(tiny: TinyRun) -> None:
    (row, *_) = tiny.write_random("a", 4)
    config = tiny.hidden_config("a")
    extract(tiny.run, config)
    wanted = store_bytes(tiny)
    flip_bit(tiny.run.hidden / "shard-a-00000.safetensors")
    with pytest.raises(ArtifactError, match="differs from the digest in its sidecar and is removed"):
        HiddenStore(tiny.run.hidden).record(row["id"])
    extract(tiny.run, config)
    assert store_bytes(tiny) == wanted


@pytest.mark.parametrize("name", ["index.parquet", "shard-a-00000.json"])
def test_flipped_bits_beside_the_shards_are_refused_and_mended(tiny: TinyRun, name: str) -> None:
    tiny.write_random("a", 4)
    config = tiny.hidden_config("a")
    manifest = extract(tiny.run, config)
    flip_bit(tiny.run.hidden / name)
    with pytest.raises(ArtifactError, match=rf"{name} differs from the digest in its manifest"):
        HiddenStore(tiny.run.hidden)
    assert extract(tiny.run, config).files == manifest.files


def test_a_manifest_edited_by_hand_is_refused(tiny: TinyRun) -> None:
    tiny.write_random("a", 4)
    extract(tiny.run, tiny.hidden_config("a"))
    path = tiny.run.hidden / "manifest.json"
    raw = json.loads(path.read_text())
    raw["counts"] |= {"in": 3, "done": 3}
    path.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=r"manifest\.json was changed after it was written"):
        HiddenStore(tiny.run.hidden)


def test_a_stray_shard_is_named_and_never_read(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    tiny.write_random("a", 4)
    tiny.run.hidden.mkdir(parents=True)
    (tiny.run.hidden / "shard-z-00007.safetensors").write_bytes(b"what is this")
    manifest = extract(tiny.run, tiny.hidden_config("a"))
    assert manifest.figures["strays"] == ["shard-z-00007.safetensors"]
    assert "shard-z-00007.safetensors" in caplog.text
    assert len(HiddenStore(tiny.run.hidden)) == 4


class FaultySource:
    """Spoils the states of chosen sequences on their way out."""

    def __init__(self, inner: Any, spoil: dict[int, Any]) -> None:
        self.inner, self.spoil = inner, spoil

    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        for index, states in self.inner.extract(sequences):
            yield index, self.spoil[index](states) if index in self.spoil else states


def nan_at(layer: int, row: int) -> Any:
    def spoil(states: States) -> States:
        aux = states.aux.clone()
        aux[row, layer * HIDDEN_SIZE + 3] = float("nan")
        return States(aux=aux, final=states.final)

    return spoil


def test_nan_and_short_states_are_quarantined_with_their_reason(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/vllm-project/speculators/pull/615: NaN states were delivered, and training went on."""
    rows = tiny.write_random("a", 6)
    spoil = {1: nan_at(1, 7), 4: lambda states: States(aux=states.aux[1:], final=states.final[1:])}
    original = extract_module.open_source
    monkeypatch.setattr(extract_module, "open_source", lambda *given: FaultySource(original(*given), spoil))
    manifest = extract(tiny.run, tiny.hidden_config("a", reject_limit=0.5))
    assert manifest.counts.model_dump(by_alias=True) == {"in": 6, "done": 4, "rejected": 2, "pending": 0}
    lines = (tiny.run.hidden / "rejects.jsonl").read_text().splitlines()
    rejects = {reject["id"]: reject for reject in map(json.loads, lines)}
    assert "the middle state of row 7 is not finite" in rejects[rows[1]["id"]]["detail"]
    assert "rows must equal ids" in rejects[rows[4]["id"]]["detail"]
    assert rejects[rows[1]["id"]]["where"] == "responses/a/tokenized_data.jsonl:2"
    store = HiddenStore(tiny.run.hidden)
    for index in (0, 2, 3, 5):
        final = plain_states(tiny.target, rows[index]["input_ids"])[1]
        torch.testing.assert_close(store.record(rows[index]["id"]).final.float(), final, rtol=1e-2, atol=1e-2)
    assert store.quarantined() == {rows[1]["id"]: "bad_states", rows[4]["id"]: "bad_states"}
    with pytest.raises(ArtifactError, match="is not in"):
        store.record(rows[1]["id"])
    with pytest.raises(TooManyRejects, match="2 of 6 records"):
        extract(tiny.run, tiny.hidden_config("a", reject_limit=0.1))


def test_bad_records_are_rejected_as_the_merge_rejects_them(tiny: TinyRun) -> None:
    rows = tiny.write_random("a", 4)
    rows[2]["loss_mask"][0] = 1
    tiny.write("a", rows)
    manifest = extract(tiny.run, tiny.hidden_config("a", reject_limit=1.0))
    assert manifest.rejected_by_reason == {"mask_misaligned": 1}
    assert len(HiddenStore(tiny.run.hidden)) == 3


def test_too_little_disk_is_refused_with_numbers_before_anything_runs(tiny: TinyRun) -> None:
    """https://github.com/SafeAILab/EAGLE/issues/30: hidden states are how disks fill."""
    tiny.write_random("a", 4)
    with pytest.raises(ConfigError, match=r"need 0\.00 GB more .* GB are free and 4611686018\.43 GB stay in reserve"):
        extract(tiny.run, tiny.hidden_config("a", disk_reserve_bytes=1 << 62))
    assert not list(tiny.run.hidden.glob("shard*"))


def test_unfinished_responses_are_refused(tiny: TinyRun) -> None:
    rows = tiny.write_random("a", 4)
    tiny.write("a", rows, pending=2)
    with pytest.raises(GateError, match="2 pending"):
        extract(tiny.run, tiny.hidden_config("a"))


def test_a_precision_once_chosen_stays(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_random("a", 4)
    config = tiny.hidden_config("a", dtype="auto")
    monkeypatch.setattr("eyas.hidden.kind.native_dtype", lambda: "float32")
    first = extract(tiny.run, config)
    monkeypatch.setattr("eyas.hidden.kind.native_dtype", lambda: "bfloat16")
    assert extract(tiny.run, config) == first
    assert first.config["kind"]["dtype"] == "float32"
