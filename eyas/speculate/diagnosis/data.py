"""Whether data and states are right: mask, places, precision, reasoning."""

from __future__ import annotations

from pathlib import Path

from eyas.speculate.diagnosis.bench import MIN_GAIN, UPSTREAM, Bench, Finding
from eyas.speculate.traffic import reasoning_shares

MIN_MASK, MIN_AGREEMENT, MAX_REASONING_GAP = 0.99, 0.97, 0.2


def mask(bench: Bench) -> Finding:
    """Generated tokens that are supervised, of those from the first one to the reply's end."""
    corpus = bench.corpus
    masks = [corpus.record(item).loss_mask.bool() for item in corpus.train[:256]]
    expected = sum(len(mask) - int(mask.int().argmax()) for mask in masks)
    share = sum(int(mask.sum()) for mask in masks) / max(1, expected)
    share *= len(set(corpus.train)) / max(1, len(set(corpus.train)) + len(corpus.unsupervised))
    return Finding(
        cause="mask coverage",
        verdict="fine" if share >= MIN_MASK else "cause",
        seen=f"{share:.1%} of generated tokens are supervised ({len(corpus.unsupervised)} records not at all)",
        bound=f"at least {MIN_MASK:.0%}",
        advice="the loss mask leaves out parts of replies, or merging.max_tokens cuts them away: compare merged/tokens.parquet "
        "with responses/, merge again",
        cost=1 - share,
    )


def places(bench: Bench) -> Finding:
    """Whether ids and final states of the store stand at the same places: the target's argmax against the next token."""
    shares = {shift: bench.sample.agreement(shift) for shift in (-1, 0, 1)}
    best = max(shares, key=lambda shift: shares[shift])
    is_cause = shares[best] > shares[0] + MIN_GAIN
    return Finding(
        cause="alignment of the stored states",
        verdict="cause" if is_cause else "fine",
        seen="the target's argmax is the next token at " + ", ".join(f"{share:.1%} (shift {s:+d})" for s, share in shares.items()),
        bound="most at shift 0",
        advice="ids and states in hidden/ are shifted against one another (template, BOS, prefix cache): extract again",
        cost=UPSTREAM if is_cause else 0.0,
    )


def precision(bench: Bench) -> Finding:
    kind, served = bench.corpus.store.kind.dtype, bench.target.dtype
    share = bench.sample.agreement(0)
    is_fine = share >= MIN_AGREEMENT or bench.sample.agreement(0, norm=bench.head.norm, eps=bench.target.rms_norm_eps) > share
    return Finding(
        cause="precision of the target",
        verdict="fine" if is_fine else "cause",
        seen=f"states in {kind}, target in {served}; they reproduce {share:.1%} of the greedy held-out tokens",
        bound=f"at least {MIN_AGREEMENT:.0%}",
        advice="the target that gave the states is not the one that generated: same weights, quantisation and dtype for "
        "hidden.dtype and the server, extract again",
        cost=1 - share,
    )


def reasoning(bench: Bench, traffic: Path | None) -> Finding:
    shares = reasoning_shares(bench.config, bench.target, bench.corpus, traffic)
    if shares is None:
        return Finding(cause="reasoning share", verdict="fine", seen="the target has no think tokens", bound="as in traffic")
    trained, other = shares
    what = "traffic" if traffic else "held-out replies (give --traffic FILE for your own)"
    gap = abs(trained - other)
    return Finding(
        cause="reasoning share",
        verdict="fine" if gap <= MAX_REASONING_GAP else "cause",
        seen=f"{trained:.1%} of trained tokens are reasoning, {other:.1%} in {what}",
        bound=f"within {MAX_REASONING_GAP:.0%}",
        advice="train on replies made as traffic is: the same template arguments, reasoning kept (generation.gates.no_reasoning)",
        cost=gap / 2,
    )
