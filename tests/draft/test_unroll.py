"""The packed, fused training code against a slow float64 reference that decodes step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eyas.draft import attention, loss
from eyas.draft.data import make_batch, supervised_columns
from eyas.draft.loss import TargetRows, target_argmax, unrolled_loss
from eyas.draft.metrics import Window, dataset_figures
from eyas.draft.model import Draft, rms_norm
from eyas.draft.replay import replay
from tests.draft.reference import SlowDraft, slow_loss
from tests.draft.tiny import random_draft, random_map, random_record, tiny_spec

MASKS = [
    [0] * 5 + [1] * 6,
    [1] * 7,  # nothing but a reply
    [0, 0, 0, 1, 1],  # the shortest turn that teaches
    [0, 0, 0, 0, 1],  # one generated token teaches nothing
    [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],  # two turns and a tail
    [0] * 3 + [1, 1, 0, 1, 1, 1],  # turns one token apart
]


def run(draft: Draft, batch, rows, lm_head, decay: float, *, wants_hits: bool = True):
    argmax = target_argmax(batch.labels, lm_head)
    num_steps = len(batch.supervised)
    normed = rms_norm(draft.unroll(batch, num_steps), draft.norm.weight, draft.spec.rms_norm_eps)
    counts = loss.kept_rows(batch.supervised, argmax, rows).sum(1)
    weights = decay ** torch.arange(num_steps, dtype=torch.float64) / counts.clamp(min=1)
    return unrolled_loss(
        normed, draft.lm_head.weight, batch.labels, argmax, batch.supervised, rows, step_weights=weights, wants_hits=wants_hits
    )


def test_figures_of_a_dataset_are_those_of_its_records_alone() -> None:
    """Against the slow reference on each dataset's records by themselves."""
    spec = tiny_spec()
    draft, d2t = random_draft(spec), random_map(spec)
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    rows = TargetRows.of(lm_head, d2t)
    records = [replace(random_record(spec, mask, seed), dataset="ab"[seed % 2]) for seed, mask in enumerate(MASKS)]
    batch = make_batch(records, 3)
    window = Window()
    window.add_datasets([(batch, run(draft, batch, rows, lm_head, 0.8))])
    figures = dataset_figures([window.datasets])
    weights = {name: value.detach().clone() for name, value in draft.named_parameters()}
    for name in "ab":
        own = [record for record in records if record.dataset == name]
        slow = slow_loss(SlowDraft(spec, weights, draft.embed_tokens), own, lm_head, rows.ids.tolist(), 3, 0.8)
        assert figures[name]["kept"] == slow.kept[0]
        assert figures[name]["step_loss"] == pytest.approx(
            [a / b for a, b in zip(slow.step_loss, slow.kept, strict=True)], abs=1e-5
        )
        wanted = [a / b for a, b in zip(slow.hits, slow.supervised, strict=True)]
        assert figures[name]["step_accuracy"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("vocabulary", ["reduced", "whole"])
def test_loss_gradients_and_acceptance_equal_the_step_by_step_reference(num_steps: int, vocabulary: str) -> None:
    spec = tiny_spec() if vocabulary == "reduced" else tiny_spec(draft_vocab_size=40)
    draft, d2t = random_draft(spec), random_map(spec)
    is_tied = vocabulary == "whole"
    lm_head = draft.embed_tokens if is_tied else torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    rows = TargetRows.of(lm_head, d2t)
    records = [random_record(spec, mask, seed) for seed, mask in enumerate(MASKS)]
    weights = {name: value.detach().clone().requires_grad_() for name, value in draft.named_parameters()}
    slow = slow_loss(SlowDraft(spec, weights, draft.embed_tokens), records, lm_head, rows.ids.tolist(), num_steps, 0.8)
    slow.loss.backward()

    batch = make_batch(records, num_steps)
    fast = run(draft, batch, rows, lm_head, 0.8)
    fast.loss.backward()

    assert fast.kept.tolist() == slow.kept
    assert fast.supervised.tolist() == slow.supervised
    assert fast.hits.tolist() == slow.hits
    torch.testing.assert_close(fast.loss, slow.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast.step_loss, torch.tensor(slow.step_loss, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )
    replayed = replay(draft, [(batch, target_argmax(batch.labels, lm_head))], rows).overall
    assert (replayed.verifications, replayed.accepted) == (slow.verifications, slow.accepted)
    assert list(replayed.step_hits) == slow.hits
    assert list(replayed.step_rows) == slow.supervised


@pytest.mark.parametrize("chunk_rows", [1, 7, 4096])
def test_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    spec = tiny_spec()
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    rows = TargetRows.of(lm_head, random_map(spec))
    batch = make_batch([random_record(spec, mask, seed) for seed, mask in enumerate(MASKS)], 4)
    draft = random_draft(spec)
    run(draft, batch, rows, lm_head, 0.8).loss.backward()
    wanted = {name: value.grad.clone() for name, value in draft.named_parameters()}
    draft.zero_grad()
    monkeypatch.setattr(loss, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(loss, "BLOCK_ROWS", max(1, chunk_rows // 3))
    run(draft, batch, rows, lm_head, 0.8, wants_hits=False).loss.backward()
    for name, value in draft.named_parameters():
        torch.testing.assert_close(value.grad, wanted[name])


def test_plain_attention_of_other_devices_equals_the_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices without the CPU's flash kernel take the plain path; the reference above proves the CPU's."""
    spec = tiny_spec()
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    rows = TargetRows.of(lm_head, random_map(spec))
    batch = make_batch([random_record(spec, mask, seed) for seed, mask in enumerate(MASKS)], 4)
    draft = random_draft(spec)
    wanted = run(draft, batch, rows, lm_head, 0.8)
    wanted.loss.backward()
    grads = {name: value.grad.clone() for name, value in draft.named_parameters()}
    draft.zero_grad()
    monkeypatch.setattr(attention, "QUERY_CHUNK", 3)
    monkeypatch.setattr(attention, "_has_flash_kernel", lambda tensor: False)
    plain = run(draft, batch, rows, lm_head, 0.8)
    plain.loss.backward()
    torch.testing.assert_close(plain.loss, wanted.loss)
    for name, value in draft.named_parameters():
        torch.testing.assert_close(value.grad, grads[name])


@pytest.mark.parametrize("objective", ["soft_ce", "overlap"])
def test_gradients_of_each_objective_equal_autograd(objective: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True)
    p = torch.randn(3, 9, dtype=torch.float64).softmax(-1)
    losses, grad = loss._OBJECTIVES[objective](logits.detach().clone(), p)
    q = logits.softmax(-1)
    wanted = -(p * q.log()).sum(-1)
    if objective == "overlap":
        wanted = wanted + 1 - torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(losses, wanted)
    wanted.sum().backward()
    torch.testing.assert_close(grad, logits.grad)


def test_six_token_alignment_table() -> None:
    """Ids 1..6, mask 0 0 1 1 1 1 (https://github.com/sgl-project/SpecForge/issues/885, https://github.com/SafeAILab/EAGLE/pull/341).

    | column t | step | input x[t+1+i] | label x[t+2+i] | label row t+1+i |
    |        1 |    0 |              3 |              4 |               2 |
    |        1 |    1 |              4 |              5 |               3 |
    |        1 |    2 |              5 |              6 |               4 |
    |        2 |    0 |              4 |              5 |               3 |
    |        2 |    1 |              5 |              6 |               4 |
    |        3 |    0 |              5 |              6 |               4 |
    """
    spec = tiny_spec()
    record = random_record(spec, [0, 0, 1, 1, 1, 1], 0)
    record.tokens.copy_(torch.arange(1, 7))
    batch = make_batch([record], 3)

    table = []
    for column in range(3):
        for step in range(3):
            if batch.supervised[step, column]:
                key = int(batch.active[column])
                token = batch.tokens[key] if step == 0 else batch.step_tokens[step - 1, column]
                row = next(r for r in range(6) if torch.equal(record.final[r], batch.labels[column + step]))
                table.append((int(batch.positions[key]), step, int(token), int(record.tokens[row + 1]), row))
    assert table == [(1, 0, 3, 4, 2), (1, 1, 4, 5, 3), (1, 2, 5, 6, 4), (2, 0, 4, 5, 3), (2, 1, 5, 6, 4), (3, 0, 5, 6, 4)]
    assert torch.equal(batch.aux, record.aux[:4])
    assert batch.tokens.tolist() == [2, 3, 4, 5]


def test_supervision_never_crosses_a_turn() -> None:
    supervised = supervised_columns(torch.tensor([0, 1, 1, 0, 1, 1, 1]), 3)
    assert supervised.nonzero().tolist() == [[0, 0], [0, 3], [0, 4], [1, 3]]


def test_an_argmax_outside_the_draft_vocabulary_is_dropped_from_the_loss_and_counted_as_a_miss() -> None:
    spec = tiny_spec()
    draft = random_draft(spec)
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64)  # ids 0..23
    record = random_record(spec, [0, 0, 1, 1, 1, 1, 1], 0)
    record.final[3] = lm_head[30] * 10  # the target wants token 30 at row 3: outside
    batch = make_batch([record], 2)
    result = run(draft, batch, TargetRows.of(lm_head, d2t), lm_head, 0.8)
    argmax = target_argmax(batch.labels, lm_head)
    outside = int((argmax >= 24).sum())
    assert outside >= 1
    assert result.supervised.tolist() == [4, 3]
    assert result.kept[0] == 4 - outside
    assert bool((result.hits <= result.kept).all())


def test_a_batch_without_supervised_tokens_is_empty() -> None:
    """Truncation may leave a batch with nothing to learn (https://github.com/verl-project/verl/issues/785, https://github.com/huggingface/trl/issues/6668)."""
    spec = tiny_spec()
    batch = make_batch([random_record(spec, [0] * 16, seed) for seed in range(3)], 4)
    assert batch.num_supervised == 0
    assert batch.num_positions == 48
    assert batch.segments == ()
