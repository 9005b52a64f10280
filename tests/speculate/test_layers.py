"""Counts that ties allow, against every way the ties can fall, and what the layer probe makes of them."""

from __future__ import annotations

import itertools

import torch

from eyas.draft.replay import walk
from eyas.speculate.accept import AcceptCounts
from eyas.speculate.layers import layer_check, possible_counts

K = 3


def every_way(hits: torch.Tensor, is_tie: torch.Tensor, supervised: torch.Tensor) -> frozenset[tuple[int, int]]:
    """The slow truth: the walk over each assignment of the ties."""
    places = (is_tie & supervised).nonzero().tolist()
    found = set()
    for fallen in itertools.product((False, True), repeat=len(places)):
        seen = hits.clone()
        for (step, column), is_hit in zip(places, fallen, strict=True):
            seen[step, column] = is_hit
        counts = walk(seen & supervised, supervised)
        found.add((counts.verifications, counts.accepted))
    return frozenset(found)


def test_possible_counts_are_those_of_every_way_that_ties_can_fall() -> None:
    torch.manual_seed(0)
    sizes = set()
    for _ in range(60):
        columns = int(torch.randint(1, 12, ()))
        hits, is_tie = torch.rand(K, columns) < 0.5, torch.rand(K, columns) < 0.2
        supervised = torch.arange(columns) + torch.arange(K)[:, None] < columns
        wanted = every_way(hits, is_tie, supervised)
        assert possible_counts(hits, is_tie, supervised) == wanted
        sizes.add(len(wanted))
    assert len(sizes) > 3


def test_no_tie_leaves_the_counts_of_the_walk() -> None:
    hits = torch.tensor([[1, 0, 1, 1, 0], [1, 0, 0, 1, 0], [0, 1, 1, 0, 0]]).bool()
    supervised = torch.arange(5) + torch.arange(K)[:, None] < 5
    # column 0 accepts 2, column 3 accepts 2 (none past the end): two verifications
    assert possible_counts(hits, torch.zeros_like(hits), supervised) == {(2, 4)}


def test_a_flipped_tie_that_another_shift_explains_better_is_no_alarm() -> None:
    served = [AcceptCounts(verifications=5, accepted=3)]
    exact = {0: [{(6, 2)}], -1: [{(5, 3)}], 1: [{(9, 0)}]}
    assert not layer_check(served, exact).holds
    granted = exact | {0: [{(6, 2), (5, 3)}]}
    assert layer_check(served, granted).holds


def test_layers_that_cannot_be_told_apart_pass() -> None:
    """A draft that accepts nothing has the same counts on any layer; the floor of the accept length refuses it."""
    nothing = [AcceptCounts(verifications=9)]
    assert layer_check(nothing, {shift: [{(9, 0)}] for shift in (0, -1, 1)}).holds


def test_a_probe_without_one_identical_reply_does_not_hold() -> None:
    check = layer_check([], {shift: [] for shift in (0, -1, 1)})
    assert not check.holds
    assert "0 replies" in check.seen
