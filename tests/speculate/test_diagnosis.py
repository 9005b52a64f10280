"""Each sabotage of a run or draft is named first, and nothing is named where nothing is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.draft.data import Record
from eyas.errors import ArtifactError, ConfigError
from eyas.speculate.diagnosis import Finding, data, diagnose, handover, outcome, render
from eyas.target.reasoning import ReasoningFormat
from eyas.workspace import RunFolder
from tests.draft.runs import D, H, V
from tests.speculate.selfmade import KEPT, LENGTH, PROMPT, Selfmade, make_selfmade, saying


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Selfmade:
    return make_selfmade(tmp_path_factory.mktemp("selfmade"))


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny target has none; the reasoning share has its own test."""
    monkeypatch.setattr(data, "reasoning_shares", lambda *_: None)


def causes(run: RunFolder, made: Selfmade) -> list[Finding]:
    return [item for item in diagnose(run, made.config) if item.verdict == "cause"]


def head_of(made: Selfmade) -> torch.Tensor:
    return load_file(made.folder / "model.safetensors")["lm_head.weight"].float()


def noisy(made: Selfmade, share: float, *, start: int = PROMPT) -> Callable[[Record], Record]:
    """The target says something else than the draft from `start` on, in `share` of its tokens."""
    head = head_of(made)

    def change(record: Record) -> Record:
        generator = torch.Generator().manual_seed(int(record.id, 16))
        tokens = torch.cat([record.tokens, (record.final[-1:].float() @ head.T).argmax(-1).int()])
        is_other = torch.rand(len(tokens), generator=generator) < share
        is_other[:start] = False
        other = torch.tensor(KEPT)[torch.randint(0, D, (len(tokens),), generator=generator)].int()
        return saying(record, torch.where(is_other, other, tokens), head)

    return change


def test_nothing_is_named_where_nothing_is_wrong(made: Selfmade, tmp_path: Path) -> None:
    run = made.write(tmp_path / "run")
    findings = diagnose(run, made.config)
    assert [item.cause for item in findings if item.verdict == "cause"] == []
    assert {item.cause for item in findings if item.verdict == "unknown"} == {"layer ids, blocks", "serving"}
    assert "hits 100.0% as it stands" in render(findings)
    assert len(json.loads((run.root / "diagnosis.json").read_bytes())) == len(findings)


def rolled(record: Record) -> Record:
    return replace(record, aux=record.aux.roll(1, 0))


def reordered(record: Record) -> Record:
    low, middle, high = record.aux.chunk(3, -1)
    return replace(record, aux=torch.cat([middle, low, high], -1))


def ids_and_states_apart(record: Record) -> Record:
    return replace(record, final=record.final.roll(1, 0))


def half_masked(record: Record) -> Record:
    mask = record.loss_mask.clone()
    mask[-10:] = 0
    return replace(record, loss_mask=mask)


@pytest.mark.parametrize(
    ("change", "cause", "word"),
    [
        (rolled, "alignment shift", "aux shifted by +1"),
        (reordered, "layer ids, order", "layers ordered middle, low, high"),
        (ids_and_states_apart, "alignment of the stored states", "shift +1"),
        (half_masked, "mask coverage", "75.0%"),
    ],
)
def test_a_spoilt_store_is_named_first(
    made: Selfmade, tmp_path: Path, change: Callable[[Record], Record], cause: str, word: str
) -> None:
    """Mask and shift: https://github.com/sgl-project/SpecForge/issues/885."""
    found = causes(made.write(tmp_path / "run", records=change), made)
    assert found[0].cause == cause
    assert word in found[0].seen


def test_states_before_the_norm_are_named_first(made: Selfmade, tmp_path: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/313."""
    norm = load_file(made.folder / "model.safetensors")["model.norm.weight"].float()
    found = causes(made.write(tmp_path / "run", records=lambda r: replace(r, final=(r.final.float() / norm).bfloat16())), made)
    assert found[0].cause == "norm"
    assert "after the target's final norm" in found[0].seen


def test_a_missing_norm_of_the_draft_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    found = causes(made.write(tmp_path / "run", tensors={"norm.weight": torch.ones(H)}), made)
    assert found[0].cause == "norm"
    assert "the target's norm before the head" in found[0].seen


def test_a_wrong_residual_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/38111: a norm flag that is not read."""
    found = causes(made.write(tmp_path / "run", norm_before_residual=True), made)
    assert found[0].cause == "norm"
    assert "norm_before_residual false" in found[0].seen


def test_a_wrong_rope_base_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    wrong = {"rope_theta": 20.0, "rope_parameters": {"rope_theta": 20.0, "rope_type": "default"}}
    found = causes(made.write(tmp_path / "run", **wrong), made)
    assert found[0].cause == "rope base"
    assert "rope_theta 10000" in found[0].seen


def test_a_truncated_map_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    size = D // 2
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[torch.tensor(KEPT[:size])] = True
    tensors = {"lm_head.weight": made.tensors["lm_head.weight"][:size], "d2t": made.tensors["d2t"][:size], "t2d": t2d}
    found = causes(made.write(tmp_path / "run", tensors=tensors, draft_vocab_size=size), made)
    assert found[0].cause == "vocabulary coverage"


def test_a_map_of_other_data_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    """https://github.com/sgl-project/SpecForge/pull/534: training metrics cannot see it."""
    ids = torch.tensor(sorted({*KEPT, 1, 3, 5} - {40, 42, 44}))
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    found = causes(made.write(tmp_path / "run", tensors={"d2t": ids - torch.arange(D), "t2d": t2d}), made)
    assert found[0].cause == "vocabulary map"


def test_another_target_than_the_one_that_generated_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    def other_words(record: Record) -> Record:
        generator = torch.Generator().manual_seed(int(record.id, 16))
        is_other = torch.rand(len(record.tokens), generator=generator) < 0.3
        return replace(record, final=torch.where(is_other[:, None], -record.final, record.final))

    found = causes(made.write(tmp_path / "run", records=other_words), made)
    assert "precision of the target" in [item.cause for item in found[:2]]


def test_a_gap_between_trained_and_held_out_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    heldout = [noisy(made, 0.4)(record) for record in made.heldout]
    found = causes(replace(made, heldout=heldout).write(tmp_path / "run"), made)
    assert found[0].cause == "train/held-out gap"


def test_a_dataset_that_lags_is_named_first(made: Selfmade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "MIN_COLUMNS", 30)
    spoil = noisy(made, 0.6)
    worse = [replace(spoil(record), dataset="b") if n % 2 else record for n, record in enumerate([*made.train, *made.heldout])]
    found = causes(replace(made, train=worse[:6], heldout=worse[6:]).write(tmp_path / "run"), made)
    assert found[0].cause == "datasets"
    assert found[0].advice.startswith("b lags")


def test_late_positions_that_were_not_learnt_are_named_first(made: Selfmade, tmp_path: Path) -> None:
    found = causes(made.write(tmp_path / "run", records=noisy(made, 0.9, start=PROMPT + (LENGTH - PROMPT) // 2)), made)
    assert found[0].cause == "position limit"


def test_a_served_accept_length_below_the_prediction_is_named_first(made: Selfmade, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/50170: served 1.036 in place of 2.77."""
    run = made.write(tmp_path / "run")
    run.benchmark.mkdir()
    (run.benchmark / "results.json").write_text('{"predicted_accept_length": 2.77, "accept_length": {"overall": 1.036}}')
    assert causes(run, made)[0].cause == "serving"


def test_reasoning_that_was_lost_in_training_is_named(made: Selfmade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "reasoning_shares", lambda *_: (0.0, 0.7))
    assert causes(made.write(tmp_path / "run"), made)[0].cause == "reasoning share"


def test_the_share_of_reasoning_is_counted_by_ids(tmp_path: Path) -> None:
    from eyas.speculate.traffic import _read, think_share

    form = ReasoningFormat(name="think", open_ids=(7,), close_ids=(8, 9))
    assert think_share(form, [[1, 2, 8, 9, 3, 3, 3, 3], [4, 4]]) == 0.4
    (tmp_path / "traffic.jsonl").write_text('{"output_ids": [1, 8, 9]}\n{"output_ids": "x"}\n')
    rows = iter(_read(tmp_path / "traffic.jsonl"))
    assert next(rows) == [1, 8, 9]
    with pytest.raises(ConfigError, match=r"traffic\.jsonl:2"):
        next(rows)


class PlainTarget:
    """Stands in for the target: a plain forward that agrees with the store but for `shift` rows and `up` blocks."""

    def __init__(self, records: list[Record], *, shift: int = 0, up: int = 0) -> None:
        self.by_tokens = {tuple(record.tokens.tolist()): record for record in records}
        self.shift, self.up = shift, up

    def __call__(self, *_: object, **__: object) -> PlainTarget:
        return self

    def plain_forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        record = self.by_tokens[tuple(tokens.tolist())]
        generator = torch.Generator().manual_seed(3)
        states = [torch.randn(LENGTH, H, generator=generator) for _ in range(8)]
        for block, own in zip((1, 3, 4), record.aux.float().chunk(3, -1), strict=True):
            states[block + 1 + self.up] = own.roll(self.shift, 0)
        return [*states, record.final.float()]


@pytest.mark.parametrize(
    ("shift", "up", "cause", "word"),
    [
        (1, 0, "alignment of the stored states", "of the token +1"),
        (-1, 0, "alignment of the stored states", "of the token -1"),
        (0, 1, "layer ids, blocks", "outputs of blocks 2, 4, 5"),
        (0, -1, "layer ids, blocks", "outputs of blocks 0, 2, 3"),
    ],
)
def test_stored_layers_are_held_against_the_target_itself(
    made: Selfmade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int, up: int, cause: str, word: str
) -> None:
    """A look ahead raises every figure of training, so hits cannot tell it: only the target can."""
    monkeypatch.setattr(handover, "TransformersSource", PlainTarget([*made.train, *made.heldout], shift=shift, up=up))
    found = causes(made.write(tmp_path / "run"), made)
    assert found[0].cause == cause
    assert word in found[0].seen


def test_sound_layers_pass_beside_the_target(made: Selfmade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TransformersSource", PlainTarget([*made.train, *made.heldout]))
    assert causes(made.write(tmp_path / "run"), made) == []


def test_a_draft_of_other_layers_is_refused_and_that_is_the_diagnosis(made: Selfmade, tmp_path: Path) -> None:
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}
    with pytest.raises(ArtifactError, match="reads other layers"):
        diagnose(made.write(tmp_path / "run", **config), made.config)


def test_steps_that_were_never_unrolled_are_named(made: Selfmade, tmp_path: Path) -> None:
    """This target says what the draft says at step 0, so deeper steps miss: a draft that was unrolled once shows it."""
    run = made.write(tmp_path / "run")
    once = made.config.model_copy(update={"draft": made.config.draft.model_copy(update={"num_unroll_steps": 1})})
    found = next(item for item in diagnose(run, once) if item.cause == "deeper unroll steps")
    assert found.verdict == "cause"
    assert found.advice.startswith("raise draft.num_unroll_steps to 3")
    whole = next(item for item in diagnose(run, made.config) if item.cause == "deeper unroll steps")
    assert whole.verdict == "fine"
