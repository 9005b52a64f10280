"""Whether target and draft understand one another: each fault is found by putting it right on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from eyas.errors import EyasError
from eyas.hidden.sources.transformers import TransformersSource
from eyas.speculate.diagnosis.bench import MIN_GAIN, UPSTREAM, Bench, Finding
from eyas.speculate.sample import HitCounts, take_sample

FORWARD_RECORDS = 2
"""Replies that the target itself is run on, for the layer ids."""
ROPE_BASES = (1e4, 5e5, 1e6)
MIN_COVERAGE = 0.95
LEAK_RATIO = 1.4
"""How many times as many hits a look one token ahead must give to be called a fault: the target's state there has seen the
token that the draft must guess, so a sound draft gains from it too (1.19× on SmolLM2-135M, where a real fault gave 1.63×)."""
MAX_STATE_ERROR = 0.2
"""Relative error of final states above which the target run here is not the one of the store."""


def alignment(bench: Bench) -> Finding:
    def variants() -> Iterator[tuple[str, HitCounts]]:
        for stream, shift in itertools.product(("tokens", "aux", "labels"), (-1, 1)):
            hits = bench.sample.hits(bench.draft, bench.rows, **{stream: shift})
            if shift < 0 or stream == "labels" or hits.rate > LEAK_RATIO * bench.base.rate:
                yield f"{stream} shifted by {shift:+d}", hits

    return bench.compare(
        "alignment shift",
        variants(),
        "column t must see aux[t] and token t+1 and be taught token t+2: draft or states are made otherwise",
    )


def layers(bench: Bench) -> list[Finding]:
    """Layers in another order, and, where the target can be run here, one block lower and higher."""

    def orders() -> Iterator[tuple[str, HitCounts]]:
        names = ("low", "middle", "high")
        for order in itertools.permutations(range(3)):
            if order != (0, 1, 2):
                text = ", ".join(names[index] for index in order)
                yield f"layers ordered {text}", bench.sample.with_layers(order).hits(bench.draft, bench.rows)

    advice = "the draft reads other layers than the states hold: compare the layer ids of its config, in both conventions"
    findings = [bench.compare("layer ids, order", orders(), advice)]
    return [*findings, _blocks(bench, advice)]


def _blocks(bench: Bench, advice: str) -> Finding:
    """The stored layers against every block of the target, and the draft on layers one block lower and higher."""
    cause, bound = "layer ids, blocks", "the target's blocks " + ", ".join(map(str, bench.target.aux_blocks))
    ids = bench.corpus.heldout[:FORWARD_RECORDS]
    try:
        source = TransformersSource(bench.target, dtype="float32", batch_tokens=4096)
        plain = [source.plain_forward(bench.corpus.record(item).tokens.int().numpy()) for item in ids]
    except (EyasError, OSError, RuntimeError, ValueError) as error:  # no weights here, or no room for them
        return Finding(cause=cause, verdict="unknown", seen=f"the target cannot be run here ({str(error)[:80]})", bound=bound)
    sample = take_sample(bench.corpus, ids, bench.head.lm_head)
    if not sample.has_states:
        return Finding(cause=cause, verdict="unknown", seen="the store keeps no final states to prove the target by", bound=bound)
    final = _error(torch.cat([record.final for record in sample.records]), torch.cat([states[-1] for states in plain]))
    if final > MAX_STATE_ERROR:
        seen = f"the target as run here gives other final states than the store's (error {final:.0%})"
        return Finding(cause=cause, verdict="unknown", seen=seen, bound=bound)
    stored = torch.cat([record.aux for record in sample.records]).chunk(3, -1)
    blocks = [torch.cat([states[block + 1] for states in plain]) for block in range(bench.target.num_layers - 1)]
    nearest = tuple(min(range(len(blocks)), key=lambda block: _error(own, blocks[block])) for own in stored)
    own = torch.cat(stored, -1)
    declared = [torch.cat([states[block + 1] for block in bench.target.aux_blocks], -1) for states in plain]
    errors = {shift: _error(own, torch.cat([states.roll(-shift, 0) for states in declared])) for shift in (-1, 0, 1)}
    closest = min(errors, key=lambda shift: errors[shift])
    if closest != 0 and errors[closest] < MAX_STATE_ERROR:
        return Finding(
            cause="alignment of the stored states",
            verdict="cause",
            seen=f"the stored layers are those of the token {closest:+d}",
            bound="those of their own token",
            advice="layers and ids in hidden/ are shifted against one another: extract again, train again",
            cost=UPSTREAM,
        )
    if nearest != bench.target.aux_blocks:
        seen = f"the stored states are the outputs of blocks {', '.join(map(str, nearest))}"
        advice = "the source takes other layers: mind its convention of layer ids, extract again, train again"
        return Finding(cause=cause, verdict="cause", seen=seen, bound=bound, advice=advice, cost=UPSTREAM)

    def variants() -> Iterator[tuple[str, HitCounts]]:
        for shift in (-1, 1):
            aux = [torch.cat([states[block + 1 + shift] for block in nearest], -1) for states in plain]
            yield f"blocks {shift:+d}", sample.with_aux(aux).hits(bench.draft, bench.rows)

    return bench.compare(cause, variants(), advice, base=sample.hits(bench.draft, bench.rows))


def _error(ours: torch.Tensor, other: torch.Tensor) -> float:
    """Relative error of [T, H] states."""
    return float((ours.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9))


def norm(bench: Bench) -> Finding:
    share, normed = bench.sample.agreement(0), bench.sample.agreement(0, norm=bench.head.norm, eps=bench.target.rms_norm_eps)
    if normed > share + MIN_GAIN:
        return Finding(
            cause="norm",
            verdict="cause",
            seen=f"the stored final state gives {share:.1%} of the next tokens, {normed:.1%} after the target's final norm",
            bound="the input of lm_head, after the norm",
            advice="the source gives the state before the final norm: apply it, extract again, train again",
            cost=UPSTREAM,
        )

    def targets_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = bench.head.norm

    spec = bench.found.spec

    def variants() -> Iterator[tuple[str, HitCounts]]:
        yield "the target's norm before the head", bench.sample.hits(bench.variant(targets_norm), bench.rows)
        other = bench.variant(norm_before_residual=not spec.norm_before_residual)
        yield f"norm_before_residual {str(not spec.norm_before_residual).lower()}", bench.sample.hits(other, bench.rows)

    return bench.compare("norm", variants(), "a norm is missing, unloaded or at another place than in training: export again")


def rope(bench: Bench) -> Finding:
    spec, target = bench.found.spec, bench.target
    known = [(target.rope["theta"], target.rope["scaling"]), *((base, None) for base in ROPE_BASES)]
    others = [pair for pair in known if pair != (spec.rope_theta, spec.rope_scaling)]

    def variants() -> Iterator[tuple[str, HitCounts]]:
        for theta, scaling in others:
            draft = bench.variant(rope_theta=theta, rope_scaling=scaling)
            yield f"rope_theta {theta:g}{', scaled' if scaling else ''}", bench.sample.hits(draft, bench.rows)

    return bench.compare(
        "rope base",
        variants(),
        f"config.json says rope_theta {spec.rope_theta:g}, the draft was trained with another: write it in both spellings",
    )


def vocabulary(bench: Bench) -> list[Finding]:
    coverage = bench.sample.coverage(bench.rows)
    advice = (
        f"raise merging.draft_vocab_size (now {bench.found.spec.draft_vocab_size}), or take the map from replies like the traffic"
    )
    covered = Finding(
        cause="vocabulary coverage",
        verdict="fine" if coverage >= MIN_COVERAGE else "cause",
        seen=f"the draft can propose {coverage:.1%} of the target's tokens",
        bound=f"at least {MIN_COVERAGE:.0%}",
        advice=advice,
        cost=1 - coverage,
    )
    told, relabelled = bench.sample.relabelled(bench.draft, bench.rows)
    is_cause = relabelled > told + max(MIN_GAIN, 0.1)
    mapped = Finding(
        cause="vocabulary map",
        verdict="cause" if is_cause else "fine",
        seen=f"hits {told:.1%} by its own map, {relabelled:.1%} if each draft id meant what it most often stands for",
        bound="no other meaning of the ids that fits better",
        advice="d2t is of another draft or holds ids in place of offsets: take the map that the draft was trained with",
        cost=relabelled - told,
    )
    return [covered, mapped]
