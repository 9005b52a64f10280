"""Why is my acceptance low? Walks the usual causes with measurements and ranks those that are found.

A wrong hand-over between target and draft is found by putting it right on purpose: the draft's hits at step 0
on held-out replies are counted as they stand and with one thing changed (a stream shifted by one, layers in another
order or one block off, another norm, another rope, another map). If a change wins clearly, that is the cause, and
what it wins is what the fault costs. Data, generalisation and serving are measured directly. Nothing is trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eyas.config import RunConfig
from eyas.draft.baseline import make_draft, replay_records
from eyas.draft.corpus import Corpus
from eyas.draft.foreign import ForeignDraft, read_draft
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.errors import ArtifactError, EyasError
from eyas.files import read_json, write_json
from eyas.hidden.sources.transformers import TransformersSource
from eyas.speculate.sample import HitCounts, take_sample
from eyas.speculate.traffic import reasoning_shares
from eyas.target.spec import TargetSpec, load_target
from eyas.target.weights import TargetHead, load_head
from eyas.workspace import RunFolder

RECORDS = 24
"""Held-out replies that every variant of the draft is run on."""
FORWARD_RECORDS = 2
"""Replies that the target itself is run on, for the layer ids."""
MIN_GAIN = 0.02
"""Share of columns that a change must win to be called a cause, beside three standard errors."""
ROPE_BASES = (1e4, 5e5, 1e6)
MIN_MASK, MIN_COVERAGE, MIN_AGREEMENT, MIN_SERVED = 0.99, 0.95, 0.97, 0.9
MAX_REASONING_GAP, MAX_TRAIN_GAP, MIN_DATASET, MIN_LATE = 0.2, 1.3, 0.6, 0.7
MIN_COLUMNS = 100
UPSTREAM = 1.0
"""Cost of states that are wrong themselves: whatever else is seen was measured on them."""
LEAK_RATIO = 1.4
"""How many times as many hits a look one token ahead must give to be called a fault: the target's state there has seen the
token that the draft must guess, so a sound draft gains from it too (1.19× on SmolLM2-135M, where a real fault gave 1.63×)."""
MAX_STATE_ERROR = 0.2
"""Relative error of final states above which the target run here is not the one of the store."""

Verdict = Literal["cause", "fine", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that was looked at: its measurement, the bound it is held against, and what to do."""

    cause: str
    verdict: Verdict
    seen: str
    bound: str
    advice: str = ""
    cost: float = 0.0
    """About the share of drafted tokens that it loses; ranks the causes."""


def diagnose(run: RunFolder, config: RunConfig, draft: Path | None = None, *, traffic: Path | None = None) -> list[Finding]:
    """Findings about the run's exported draft, or the one in `draft`, causes first, the costliest at the top.

    `traffic` is JSON Lines with `output_ids` of real replies. Writes `diagnosis.json` into the run folder. Raises
    `ConfigError` or `ArtifactError` where the draft itself does not fit the target: that then is the diagnosis.
    """
    target = load_target(config.target)
    head = load_head(target, torch.float32)
    corpus = Corpus.open(run)
    found = read_draft(draft or run.export, target, head.embed_tokens)
    bench = _Bench(run=run, config=config, target=target, head=head, corpus=corpus, found=found)
    findings = [
        *(_mask(bench), _data(bench), _alignment(bench), *_layers(bench), _norm(bench), _rope(bench), *_vocabulary(bench)),
        *(_precision(bench), _reasoning(bench, traffic), _gap(bench), _datasets(bench), _positions(bench), _served(bench)),
    ]
    order = {"cause": 0, "unknown": 1, "fine": 2}
    findings.sort(key=lambda item: (order[item.verdict], -item.cost))
    write_json(run.root / "diagnosis.json", [asdict(item) for item in findings])
    return findings


def render(findings: Sequence[Finding]) -> str:
    """The findings as text, causes first."""
    causes = [item for item in findings if item.verdict == "cause"]
    lines = [f"{len(causes)} of {len(findings)} causes found" + (", the costliest first:" if causes else ".")]
    for item in findings:
        cost = f" (costs about {item.cost:.1%} of drafted tokens)" if item.verdict == "cause" and item.cost else ""
        if item.cost == UPSTREAM:
            cost = " (mend it first: all else was measured on these states)"
        lines.append(f"[{item.verdict}] {item.cause}: {item.seen}; wanted {item.bound}{cost}")
        if item.verdict == "cause":
            lines.append(f"        {item.advice}")
    return "\n".join(lines)


class _Bench:
    """The draft beside the run's held-out replies; every variant is measured on the same columns."""

    def __init__(
        self, *, run: RunFolder, config: RunConfig, target: TargetSpec, head: TargetHead, corpus: Corpus, found: ForeignDraft
    ) -> None:
        self.run, self.config, self.target, self.head, self.corpus, self.found = run, config, target, head, corpus, found
        if not corpus.heldout:
            raise ArtifactError(f"{run.merged} holds no held-out reply; a diagnosis needs some, see prompts.heldout_share")
        self.sample = take_sample(corpus, corpus.heldout[:RECORDS], head.lm_head)
        self.rows = TargetRows.of(head.lm_head, found.tensors["d2t"])
        self.draft = self.variant()
        self.base = self.sample.hits(self.draft, self.rows)

    def variant(self, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **spec: Any) -> Draft:
        """The draft with other tensors or another spec."""
        tensors = dict(self.found.tensors)
        if change is not None:
            change(tensors)
        return make_draft(replace(self.found.spec, **spec), tensors, self.head.embed_tokens)

    def compare(
        self, cause: str, variants: Iterator[tuple[str, HitCounts]], advice: str, *, base: HitCounts | None = None
    ) -> Finding:
        """A cause if one of `variants` clearly hits more often than the draft as it stands, `base` on the same columns."""
        base = base or self.base
        name, best = max(variants, key=lambda item: item[1].rate)
        gain = best.rate - base.rate
        bound = max(MIN_GAIN, 3 * (base.error**2 + best.error**2) ** 0.5)
        seen = f"hits {base.rate:.1%} as it stands, {best.rate:.1%} with {name}"
        is_cause = gain > bound
        return Finding(
            cause=cause,
            verdict="cause" if is_cause else "fine",
            seen=seen,
            bound=f"no change that wins more than {bound:.1%}",
            advice=f"{advice} ({name})",
            cost=gain if is_cause else 0.0,
        )


# data


def _mask(bench: _Bench) -> Finding:
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


def _data(bench: _Bench) -> Finding:
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


def _precision(bench: _Bench) -> Finding:
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


def _reasoning(bench: _Bench, traffic: Path | None) -> Finding:
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


# hand-overs


def _alignment(bench: _Bench) -> Finding:
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


def _layers(bench: _Bench) -> list[Finding]:
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


def _blocks(bench: _Bench, advice: str) -> Finding:
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


def _norm(bench: _Bench) -> Finding:
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


def _rope(bench: _Bench) -> Finding:
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


def _vocabulary(bench: _Bench) -> list[Finding]:
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


# generalisation and serving


def _gap(bench: _Bench) -> Finding:
    corpus = bench.corpus
    count = min(RECORDS, len(corpus.train))
    seen = sorted(set(corpus.train))[:: max(1, len(set(corpus.train)) // count)][:count]
    train = take_sample(corpus, seen, bench.head.lm_head).hits(bench.draft, bench.rows)
    ratio = train.rate / max(bench.base.rate, 1e-9)
    is_cause = ratio > MAX_TRAIN_GAP and train.rate - bench.base.rate > 3 * (train.error**2 + bench.base.error**2) ** 0.5
    return Finding(
        cause="train/held-out gap",
        verdict="cause" if is_cause else "fine",
        seen=f"hits {train.rate:.1%} on trained replies, {bench.base.rate:.1%} on held-out ones ({ratio:.2f}×)",
        bound=f"at most {MAX_TRAIN_GAP:g}×",
        advice="more and more varied replies, fewer epochs",
        cost=train.rate - bench.base.rate if is_cause else 0.0,
    )


def _datasets(bench: _Bench) -> Finding:
    found = replay_records(
        bench.draft, bench.found.tensors["d2t"], bench.head, bench.corpus, bench.corpus.heldout[: 4 * RECORDS], bench.config
    )
    pooled = found.overall.accept_length
    counted = {name: item for name, item in found.per_dataset.items() if item.verifications >= MIN_COLUMNS}
    lengths = ", ".join(f"{name} {item.accept_length:.2f}" for name, item in sorted(found.per_dataset.items()))
    worst = min(counted, key=lambda name: counted[name].accept_length, default="")
    ratio = (counted[worst].accept_length - 1) / max(pooled - 1, 1e-9) if worst else 1.0
    is_cause = ratio < MIN_DATASET
    share = counted[worst].verifications / max(1, found.overall.verifications) if worst else 0.0
    return Finding(
        cause="datasets",
        verdict="cause" if is_cause else "fine",
        seen=f"accept length {pooled:.2f} pooled over {found.overall.verifications} verifications: {lengths}",
        bound=f"each at least {MIN_DATASET:.0%} of the pooled drafts accepted",
        advice=f"{worst} lags: more of its replies (merging.mixture.{worst}), or leave it out of what the draft serves",
        cost=share * (1 - ratio) * bench.base.rate if is_cause else 0.0,
    )


def _positions(bench: _Bench) -> Finding:
    early, late, limit = bench.sample.by_position(bench.draft, bench.rows)
    spec = bench.found.spec
    is_cause = late.total >= MIN_COLUMNS and late.rate < MIN_LATE * early.rate
    note = f" (trained up to {bench.config.merging.max_tokens})"
    note += "" if spec.context_length >= bench.target.context_length else f"; its context is {spec.context_length} tokens"
    return Finding(
        cause="position limit",
        verdict="cause" if is_cause else "fine",
        seen=f"hits {early.rate:.1%} before position {limit}, {late.rate:.1%} after it{note}",
        bound=f"at least {MIN_LATE:.0%} of the early ones",
        advice="long replies are not learnt: raise merging.max_tokens, keep long records in the mixture",
        cost=late.total / max(1, late.total + early.total) * (early.rate - late.rate) if is_cause else 0.0,
    )


def _served(bench: _Bench) -> Finding:
    path = bench.run.benchmark / "results.json"
    results = read_json(path) if path.is_file() else {}
    predicted, served = results.get("predicted_accept_length"), (results.get("accept_length") or {}).get("overall")
    if not predicted or not served:
        return Finding(cause="serving", verdict="unknown", seen="no benchmark of this run yet", bound="run eyas bench")
    ratio = served / predicted
    return Finding(
        cause="serving",
        verdict="fine" if ratio >= MIN_SERVED else "cause",
        seen=f"accept length {served:.2f} served, {predicted:.2f} predicted by the replay",
        bound=f"at least {MIN_SERVED:.0%} of the prediction",
        advice="the engine does not serve what was trained: layer ids, dtype and flags of its launch (benchmark/report.md)",
        cost=(predicted - served) / max(1, bench.config.benchmark.num_draft_tokens),
    )
