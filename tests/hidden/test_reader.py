"""The reader takes from a shard what was written, names what is wrong with it, and keeps none of it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import ArtifactError
from eyas.hidden.extract import extract
from eyas.hidden.kind import StoreKind
from eyas.hidden.store import HiddenStore
from eyas.hidden.store.reader import read_record
from eyas.hidden.store.shard import ShardEntry, open_shard, shard_tensors, write_shard
from tests.hidden.tiny import TinyRun


def test_nan_on_disk_is_named_at_read(tiny: TinyRun) -> None:
    """https://github.com/vllm-project/speculators/pull/615, at the other end: record, layer and row."""
    (row, *_) = tiny.write_random("a", 2, longest=400)
    extract(tiny.run, tiny.hidden_config("a"))
    path = tiny.run.hidden / "shard-a-00000.safetensors"
    tensors = load_file(path)
    tensors["final"][5, 0] = float("nan")
    write_shard(path, tensors)
    with pytest.raises(ArtifactError, match=rf"record {row['id']} .*the final state of row 5 is not finite"):
        HiddenStore(tiny.run.hidden, checks_digests=False).record(row["id"])


def test_a_shard_that_changes_under_its_reader_is_named(tiny: TinyRun) -> None:
    (row, *_) = tiny.write_random("a", 4)
    extract(tiny.run, tiny.hidden_config("a"))
    store = HiddenStore(tiny.run.hidden)
    store.record(row["id"])
    path = tiny.run.hidden / "shard-a-00000.safetensors"
    tensors = load_file(path)
    tensors["aux"] += 1
    write_shard(path, tensors)
    with pytest.raises(ArtifactError, match=r"shard-a-00000\.safetensors was changed while it was read"):
        store.record(row["id"])


@pytest.mark.parametrize("spoil", ["dtype", "shape", "place", "header"])
def test_a_shard_with_another_header_is_named(tiny: TinyRun, spoil: str) -> None:
    (row, *_) = tiny.write_random("a", 4)
    extract(tiny.run, tiny.hidden_config("a"))
    path = tiny.run.hidden / "shard-a-00000.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if spoil == "dtype":
        header["aux"]["dtype"] = "F16"
    elif spoil == "shape":
        header["aux"]["shape"][0] -= 1
    elif spoil == "place":
        header["final"]["data_offsets"] = [offset + 1 for offset in header["final"]["data_offsets"]]
    encoded = b"[" if spoil == "header" else json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(content[:8] + encoded.ljust(size)[:size] + content[8 + size :])
    with pytest.raises(ArtifactError, match="run the extraction again"):
        HiddenStore(tiny.run.hidden, checks_digests=False).record(row["id"])


def test_reading_a_shard_leaves_none_of_it_in_memory(tmp_path: Path) -> None:
    """Mapped, all 33 MB of this one would stay resident."""
    size, num_records, length = 1024, 40, 100
    kind = StoreKind(target="t", blocks=(1, 3, 4), hidden_size=size, codec="bf16", source="transformers", dtype="bfloat16")
    states = {
        "aux": torch.randn(num_records * length, 3 * size).bfloat16(),
        "final": torch.randn(num_records * length, size).bfloat16(),
    }
    tokens, mask = torch.arange(num_records * length, dtype=torch.int32), torch.ones(num_records * length, dtype=torch.uint8)
    size_bytes, sha256 = write_shard(
        tmp_path / "shard-a-00000.safetensors", shard_tensors(tokens, mask, [length] * num_records, states)
    )
    entry = ShardEntry(
        name="shard-a-00000", dataset="a", number=0, kind=kind.digest(), plan="", ids=["x"] * num_records, addresses=[],
        num_tokens=[length] * num_records, quarantined=[], size_bytes=size_bytes, sha256=sha256,
    )  # fmt: skip
    shard = open_shard(tmp_path, entry, kind, checks_digest=True)
    read_record(shard, 0, length, kind, "")
    before = resident_bytes()
    for row in range(num_records):
        record = read_record(shard, row, length, kind, "")
        rows = slice(row * length, (row + 1) * length)
        assert torch.equal(record.aux, states["aux"][rows])
        assert torch.equal(record.final, states["final"][rows])
        assert torch.equal(record.tokens, tokens[rows])
    assert resident_bytes() - before < 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
