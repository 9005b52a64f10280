"""Coded states decode to what a slow, obvious version says, take the bytes that are forecast, and are told apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from eyas.draft.corpus import Corpus
from eyas.errors import ArtifactError, ConfigError
from eyas.files import digest_json
from eyas.hidden.codec import BLOCK, TOP, CodecName, Number, bytes_per_token
from eyas.hidden.extract import extract, plan_shards
from eyas.hidden.kind import StoreKind
from eyas.hidden.store import HiddenStore
from eyas.hidden.store.codecs import decode, encode, layout
from eyas.hidden.store.top import TopTargets, decode_top, top_argmax, top_logits
from eyas.merging.merge import merge
from tests.hidden.tiny import HIDDEN_SIZE, TinyRun, load_plain, plain_states

CODED: list[CodecName] = ["fp8", "int4", "int4_top"]


def uneven_states(rows: int, width: int) -> torch.Tensor:
    """States whose channels differ in size as a language model's do: one of 64 is 300 times the rest."""
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
    values[:, ::64] *= 300
    return values.bfloat16()


def slowly_coded(states: torch.Tensor, number: Number) -> torch.Tensor:
    """Value by value, in Python's own arithmetic but for the roundings to bf16 and fp8."""
    rows, width = states.shape
    columns = states.double().T.tolist()
    channels = [2.0 ** round(math.log2(math.sqrt(sum(v * v for v in column) / rows))) for column in columns]
    result = torch.zeros(rows, width)
    for row in range(rows):
        for start in range(0, width, BLOCK):
            block = [float(states[row, c]) / channels[c] for c in range(start, start + BLOCK)]
            largest = 448.0 if number == "fp8" else 7.0
            scale = float(torch.tensor(max(map(abs, block)) / largest).bfloat16())
            for offset, value in enumerate(block):
                unit = max(-largest, min(largest, float(torch.tensor(value / scale, dtype=torch.float32))))
                code = float(torch.tensor(unit).to(torch.float8_e4m3fn)) if number == "fp8" else float(round(unit))
                result[row, start + offset] = code * scale * channels[start + offset]
    return result.bfloat16()


@pytest.mark.parametrize(("number", "largest_error"), [("fp8", 0.04), ("int4", 0.12)])
def test_a_code_is_what_the_slow_version_says_and_spares_small_channels(number: Number, largest_error: float) -> None:
    states = uneven_states(40, 128)
    tensors = encode("aux", states, number)
    decoded = decode("aux", tensors, slice(0, 40), number)
    assert torch.equal(decoded, slowly_coded(states, number))
    assert torch.equal(decode("aux", tensors, slice(7, 9), number), decoded[7:9])
    small = [channel for channel in range(128) if channel % 64]
    for channels in (small, [0, 64]):
        error = (decoded[:, channels].float() - states[:, channels].float()).norm() / states[:, channels].float().norm()
        assert error < largest_error


def test_zero_rows_and_no_rows_are_coded() -> None:
    for number in ("fp8", "int4"):
        states = torch.zeros(3, 64, dtype=torch.bfloat16)
        assert torch.equal(decode("x", encode("x", states, number), slice(0, 3), number), states)
        assert decode("x", encode("x", states[:0], number), slice(0, 0), number).shape == (0, 64)


def test_bytes_per_token_are_those_of_the_tensors_and_a_quarter_of_the_peers() -> None:
    for name in ("bf16", *CODED):
        rows, _ = layout(name, 7168)
        assert bytes_per_token(7168, name) == sum(dtype.itemsize * width for dtype, width in rows.values()) + 5
    peers = 8 * 7168 + 16
    assert bytes_per_token(7168, "bf16") < peers
    assert bytes_per_token(7168, "int4") < 0.35 * peers
    assert bytes_per_token(7168, "int4_top") <= peers / 4


@pytest.mark.parametrize("codec", CODED)
def test_a_coded_store_reads_like_an_exact_one(tiny: TinyRun, codec: CodecName) -> None:
    rows = tiny.write_random("a", 12)
    config = tiny.hidden_config("a", codec=codec)
    merge(tiny.run, config)
    manifest = extract(tiny.run, config)
    store = HiddenStore(tiny.run.hidden)
    (path,) = tiny.run.hidden.glob("shard*.safetensors")
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    assert abs(path.stat().st_size - num_tokens * bytes_per_token(HIDDEN_SIZE, codec)) < 4096  # header, offsets, channels
    assert list(store.verify()) == ["shard-a-00000"]
    for row in rows:
        record = store.record(row["id"])
        aux, final = plain_states(tiny.target, row["input_ids"])
        assert record.aux.dtype == torch.bfloat16
        assert (record.aux.float() - aux).norm() / aux.norm() < (0.04 if codec == "fp8" else 0.15)
        if codec != "int4_top":
            assert (record.final.float() - final).norm() / final.norm() < 0.04
    assert extract(tiny.run, config) == manifest


def test_top_k_probabilities_are_those_of_the_targets_own_head(tiny: TinyRun) -> None:
    rows = tiny.write_random("a", 12)
    config = tiny.hidden_config("a", codec="int4_top")
    merge(tiny.run, config)
    extract(tiny.run, config)
    corpus = Corpus.open(tiny.run)
    kept = torch.arange(len(corpus.d2t)) + corpus.d2t
    assert not corpus.has_states
    for row in rows[1:]:
        labels = corpus.record(row["id"]).final
        assert labels.shape == (len(row["input_ids"]), 1 + 2 * min(TOP, len(kept)))
        generated = torch.tensor(row["loss_mask"]).bool()
        logits = load_plain(tiny.target)(torch.tensor([row["input_ids"]])).logits[0, generated].detach()
        wanted = logits[:, kept].softmax(-1)
        seen = top_logits(labels[generated], len(kept)).exp()
        assert torch.equal(top_argmax(labels[generated]), logits.argmax(-1))
        torch.testing.assert_close(seen.sum(-1), torch.ones(len(seen)), rtol=0, atol=2e-3)
        best = wanted.topk(min(TOP, len(kept))).indices
        torch.testing.assert_close(seen.gather(1, best), wanted.gather(1, best), rtol=2e-2, atol=2e-3)
        assert not labels[~generated].any()


def test_the_rest_of_the_mass_is_spread_over_the_rest_of_the_vocabulary() -> None:
    kept = torch.arange(0, 400, 2)
    lm_head = torch.randn(400, 32, generator=torch.Generator().manual_seed(1)) * 0.3
    final = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    tensors = TopTargets(lm_head=lm_head, kept=kept).encode(final, torch.ones(5))
    seen = top_logits(decode_top(tensors, slice(0, 5)), 200).exp()
    exact = (final.float() @ lm_head.T)[:, kept].softmax(-1)
    for row in range(5):
        best = set(exact[row].topk(TOP).indices.tolist())
        rest = [index for index in range(200) if index not in best]
        torch.testing.assert_close(seen[row, rest], exact[row, rest].sum().expand(136) / 136, rtol=2e-2, atol=1e-5)


def test_top_k_needs_the_merged_map_and_follows_it(tiny: TinyRun) -> None:
    tiny.write_random("a", 12)
    config = tiny.hidden_config("a", codec="int4_top")
    with pytest.raises(ConfigError, match="run the merge first"):
        extract(tiny.run, config)
    merge(tiny.run, config)
    extract(tiny.run, config)
    changed = config.model_copy(update={"merging": config.merging.model_copy(update={"draft_vocab_size": 40})})
    merge(tiny.run, changed)
    with pytest.raises(ArtifactError, match="another draft vocabulary"):
        Corpus.open(tiny.run)
    extract(tiny.run, changed)
    assert Corpus.open(tiny.run).record(Corpus.open(tiny.run).train[0]).final.shape[1] == 1 + 2 * 40


def test_another_codec_is_another_address_and_never_mixed(tiny: TinyRun) -> None:
    (row, *_) = tiny.write_random("a", 4)
    exact, coded = tiny.hidden_config("a"), tiny.hidden_config("a", codec="int4")
    before = plan_shards(tiny.run, exact, "a")[0].digest
    extract(tiny.run, exact)
    kept = (tiny.run.hidden / "shard-a-00000.json").read_bytes()
    assert plan_shards(tiny.run, coded, "a")[0].digest != before
    extract(tiny.run, coded)
    store = HiddenStore(tiny.run.hidden)
    (tiny.run.hidden / "shard-a-00000.json").write_bytes(kept)
    with pytest.raises(ArtifactError, match="states of another kind"):
        store.record(row["id"])


def test_a_hidden_size_that_blocks_do_not_divide_is_refused(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_random("a", 4)
    monkeypatch.setattr("eyas.hidden.demands.BLOCK", 48)
    with pytest.raises(ConfigError, match="hidden size 32 is no multiple"):
        extract(tiny.run, tiny.hidden_config("a", codec="fp8"))


def test_exact_stores_keep_the_address_they_had_before_there_were_codecs(target: Path) -> None:
    fields = {"target": "t", "blocks": [1, 3, 4], "hidden_size": 32, "codec": "bf16", "source": "transformers", "dtype": "float32"}
    assert StoreKind.model_validate(fields).digest() == digest_json({**fields, "version": 1})
