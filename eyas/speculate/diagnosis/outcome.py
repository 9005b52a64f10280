"""What the draft makes of it: unroll steps, generalisation, datasets, positions, serving."""

from __future__ import annotations

from eyas.files import read_json
from eyas.speculate.diagnosis.bench import MIN_COLUMNS, RECORDS, Bench, Finding
from eyas.speculate.sample import take_sample

MAX_TRAIN_GAP, MIN_DATASET, MIN_LATE, MIN_SERVED, MIN_DEEPER = 1.3, 0.6, 0.7, 0.9, 0.7


def deeper_steps(bench: Bench) -> Finding:
    """Hits at every step of the served chain: what was never unrolled in training falls off."""
    accuracy = bench.replayed.overall.step_accuracy
    trained, served = bench.config.draft.num_unroll_steps, len(accuracy)
    first = accuracy[trained] if trained < served else 0.0
    ratio = first / max(accuracy[trained - 1], 1e-9) if trained < served else 1.0
    is_cause = ratio < MIN_DEEPER
    return Finding(
        cause="deeper unroll steps",
        verdict="cause" if is_cause else "fine",
        seen=f"hits {', '.join(f'{share:.1%}' for share in accuracy)} along the chain, trained for {trained} steps",
        bound=f"at least {MIN_DEEPER:.0%} of the last trained step at the first that was not",
        advice=f"raise draft.num_unroll_steps to {served} and train again, or serve chains of {trained}",
        cost=(accuracy[trained - 1] - first) * (served - trained) / served if is_cause else 0.0,
    )


def gap(bench: Bench) -> Finding:
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


def datasets(bench: Bench) -> Finding:
    found = bench.replayed
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


def positions(bench: Bench) -> Finding:
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


def served(bench: Bench) -> Finding:
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
