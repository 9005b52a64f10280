"""The probe passes what is right and says which of norm, layer and alignment is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.errors import GateError
from eyas.files import read_json
from eyas.generation.config import GenerationConfig
from eyas.hidden.batching import length_buckets
from eyas.hidden.extract import extract
from eyas.hidden.probe import ProbeReply, check_blocks, check_greedy, probe_states
from eyas.hidden.sources.protocol import States, TokenIds
from eyas.target.config import TargetConfig
from eyas.target.spec import TargetSpec, load_target
from eyas.target.weights import load_head
from tests.hidden.tiny import TinyRun, greedy, load_plain


@pytest.fixture(scope="module")
def spec(target: Path) -> TargetSpec:
    return load_target(TargetConfig(model=str(target)))


@pytest.fixture(scope="module")
def replies(target: Path) -> list[ProbeReply]:
    prompts = [np.random.default_rng(n).integers(5, 261, 5).tolist() for n in range(6)]
    return [
        ProbeReply(id=str(n), tokens=np.array(greedy(target, p, 20), dtype=np.int32), prompt_tokens=5)
        for n, p in enumerate(prompts)
    ]


class WrongSource:
    """A plain forward whose states are taken at chosen blocks, before or after the norm, shifted or not."""

    def __init__(self, target: Path, *, blocks: tuple[int, int, int] = (1, 3, 4), has_norm: bool = True, shift: int = 0) -> None:
        self.target, self.blocks, self.has_norm, self.shift = target, blocks, has_norm, shift

    @torch.inference_mode()
    def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
        for index, sequence in enumerate(sequences):
            before: list[torch.Tensor] = []
            model = load_plain(self.target).model
            handle = model.norm.register_forward_pre_hook(lambda module, inputs, kept=before: kept.append(inputs[0]))
            output = model(torch.from_numpy(sequence).long()[None], output_hidden_states=True)
            handle.remove()
            aux = torch.cat([output.hidden_states[block + 1][0] for block in self.blocks], -1)
            final = (output.last_hidden_state if self.has_norm else before[0])[0]
            yield index, States(aux=aux.bfloat16(), final=final.roll(self.shift, 0).bfloat16())


def prove(source: WrongSource, spec: TargetSpec, replies: list[ProbeReply]) -> dict[str, float]:
    states = probe_states(source, replies, spec.hidden_size)
    plain = load_plain(source.target)(torch.from_numpy(replies[0].tokens).long()[None], output_hidden_states=True).hidden_states
    figures = check_greedy(states, replies, load_head(spec, torch.float32), spec, 0.99)
    return figures | check_blocks(states[0], [tensor[0].detach() for tensor in plain], spec)


def test_right_states_pass(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    figures = prove(WrongSource(target), spec, replies)
    assert figures["greedy_agreement"] + figures["greedy_ties"] >= 0.99
    assert figures["greedy_positions"] == 120


def test_states_before_the_norm_are_named(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    """https://github.com/vllm-project/speculators/pull/313: states before the norm, used as if after it."""
    with pytest.raises(GateError, match="gives the state before the norm"):
        prove(WrongSource(target, has_norm=False), spec, replies)


def test_a_wrong_final_state_is_found_without_greedy_replies(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    states = probe_states(WrongSource(target, has_norm=False), replies, spec.hidden_size)
    plain = load_plain(target)(torch.from_numpy(replies[0].tokens).long()[None], output_hidden_states=True).hidden_states
    with pytest.raises(GateError, match="the final state is not the input of lm_head"):
        check_blocks(states[0], [tensor[0].detach() for tensor in plain], spec)


def test_layer_ids_off_by_one_are_named(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    with pytest.raises(GateError, match=r"the low state is not the output of block 1 .* off by 1"):
        prove(WrongSource(target, blocks=(2, 4, 5)), spec, replies)


def test_shifted_rows_are_named(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    with pytest.raises(GateError, match="shifted by 1 row"):
        prove(WrongSource(target, shift=1), spec, replies)


def test_a_missing_row_is_named(target: Path, spec: TargetSpec, replies: list[ProbeReply]) -> None:
    """https://github.com/vllm-project/vllm/issues/44485, https://github.com/sgl-project/sglang/pull/30177: rows must equal ids."""

    class Short(WrongSource):
        def extract(self, sequences: Sequence[TokenIds]) -> Iterator[tuple[int, States]]:
            for index, states in super().extract(sequences):
                yield index, States(aux=states.aux[3:], final=states.final[3:])

    with pytest.raises(GateError, match=r"record 0: aux states are \[22, 96\], wanted \[25, 96\]"):
        probe_states(Short(target), replies, spec.hidden_size)


def test_a_run_proves_its_source_once_and_remembers(tiny: TinyRun) -> None:
    tiny.write_greedy("a", 6)
    tiny.write_greedy("b", 6)
    extract(tiny.run, tiny.hidden_config("a", "b", probe_records=8))
    proof = read_json(tiny.run.hidden / "probe.json")["figures"]
    assert proof["records"] == 8
    assert proof["greedy_agreement"] + proof["greedy_ties"] >= 0.99
    assert max(proof["state_errors"].values()) < 0.01


def test_replies_that_the_target_did_not_choose_stop_the_run(tiny: TinyRun) -> None:
    """https://github.com/vllm-project/speculators/pull/313: greedy agreement above 99% is a gate before training."""
    tiny.write_random("a", 6)
    with pytest.raises(GateError, match=r"wanted 99\.0%"):
        extract(tiny.run, tiny.hidden_config("a", probe_records=4))
    assert not list(tiny.run.hidden.glob("shard*"))


def test_above_temperature_0_the_heldout_replies_are_the_greedy_ones(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    sampled, greedy = tiny.write_random("a", 12), tiny.write_greedy("a", 12)
    pairs = enumerate(zip(sampled, greedy, strict=True))
    tiny.write("a", [chosen | {"split": "heldout"} if n % 3 == 0 else other | {"split": "train"} for n, (other, chosen) in pairs])
    config = tiny.hidden_config("a", probe_records=8)
    config = config.model_copy(update={"generation": GenerationConfig.model_validate({"sampling": {"temperature": 0.7}})})
    extract(tiny.run, config)
    proof = read_json(tiny.run.hidden / "probe.json")["figures"]
    assert (proof["records"], proof["greedy_positions"]) == (4, 48)
    assert proof["greedy_agreement"] + proof["greedy_ties"] >= 0.99
    tiny.write("a", [row | {"split": "heldout"} for row in sampled])
    (tiny.run.hidden / "probe.json").unlink()
    with pytest.raises(GateError, match=r"wanted 99\.0%"):
        extract(tiny.run, config)
    tiny.write("a", [row | {"split": "train"} for row in sampled])
    extract(tiny.run, config)
    assert "no reply was generated at temperature 0" in caplog.text


def test_batches_hold_every_sequence_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 300).tolist()
    batches = length_buckets(lengths, 1000)
    assert sorted(index for batch in batches for index in batch) == list(range(300))
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    assert max(padded) <= 1000
    assert sum(padded) < 1.05 * sum(lengths)
    assert length_buckets([5, 2000], 1000) == [[1], [0]]
