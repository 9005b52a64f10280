"""What a GPU needs of the code, shown on a machine without one: every tensor of a step is made where its inputs are."""

from __future__ import annotations

import pytest
import torch

from eyas.draft.data import make_batch
from eyas.draft.loss import TargetRows, kept_rows, target_argmax, unrolled_loss
from eyas.draft.model import rms_norm
from tests.draft.tiny import random_draft, random_map, random_record, tiny_spec

MASKS = [[0] * 5 + [1] * 6, [1] * 7, [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("objective", ["soft_ce", "overlap"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_step_runs_on_another_device(objective: str, recompute: bool) -> None:
    """The meta device computes shapes alone and refuses, as a GPU does, a tensor that was left on the CPU."""
    device, spec = torch.device("meta"), tiny_spec()
    draft = random_draft(spec, dtype=torch.float32)
    draft.cast(torch.bfloat16, device)
    lm_head = torch.empty(spec.vocab_size, spec.hidden_size, dtype=torch.bfloat16, device=device)
    index = torch.arange(spec.draft_vocab_size, device=device)
    to_draft = torch.empty(spec.vocab_size, dtype=torch.int64, device=device)
    rows = TargetRows(head=lm_head[: spec.draft_vocab_size], ids=index, to_draft=to_draft)
    batch = make_batch([random_record(spec, mask, seed) for seed, mask in enumerate(MASKS)], 4).to(device)
    argmax = target_argmax(batch.labels.bfloat16(), lm_head)
    assert target_argmax(batch.labels.bfloat16(), lm_head, is_exact=True).device == device
    kept = kept_rows(batch.supervised, argmax, rows).sum(1)
    states = draft.unroll(batch, 4, recompute=recompute)
    result = unrolled_loss(
        rms_norm(states, draft.norm.weight, spec.rms_norm_eps),
        draft.lm_head.weight,
        batch.labels,
        argmax,
        batch.supervised,
        rows,
        step_weights=0.8 ** torch.arange(4, device=device) / kept.clamp(min=1),
        wants_hits=True,
        objective=objective,
    )
    result.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.device == device for parameter in draft.parameters())
    assert {value.device for value in (result.loss, result.step_loss, result.kept, result.supervised, result.hits)} == {device}


def test_recomputing_unroll_steps_changes_no_gradient() -> None:
    spec = tiny_spec()
    draft, d2t = random_draft(spec), random_map(spec)
    lm_head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
    assert TargetRows.of(lm_head, d2t).head.shape == (spec.draft_vocab_size, spec.hidden_size)
    batch = make_batch([random_record(spec, mask, seed) for seed, mask in enumerate(MASKS)], 4)
    gradients = []
    for recompute in (False, True):
        draft.zero_grad()
        draft.unroll(batch, 4, recompute=recompute).square().sum().backward()
        gradients.append({name: value.grad.clone() for name, value in draft.named_parameters() if value.grad is not None})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=0, atol=0)
