"""Would smaller hidden states do for this target? Measured on 200 replies of the run, before all states are stored.

Their exact states are extracted in a small run of their own, coded and decoded as a shard would be. A codec passes
where the three states come back within `MAX_AUX_ERROR`, lm_head of the final state gives the target's token as often as
the source's own proof asks, and the run's draft (its trained one, else the baseline), replayed on decoded states, has the
accept length of the exact ones within `MAX_CHANGE`. Without a draft the first two decide and the result says so.
`hidden/codecs.json` is what the plan shows; nothing is chosen here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from eyas.config import RunConfig
from eyas.draft.baseline import make_draft
from eyas.draft.data import Record, make_batch
from eyas.draft.export import load_export
from eyas.draft.loss import TargetRows, target_argmax
from eyas.draft.model import Draft
from eyas.draft.replay import replay
from eyas.errors import ConfigError
from eyas.files import write_json
from eyas.hidden.codec import BLOCK, CODECS, CodecName, bytes_per_token
from eyas.hidden.extract import extract
from eyas.hidden.kind import read_map
from eyas.hidden.probe import TIE_SHARE
from eyas.hidden.store import HiddenStore
from eyas.hidden.store.codecs import decode, encode_states
from eyas.hidden.store.shard import load_entry, open_shard
from eyas.hidden.store.top import TopTargets
from eyas.manifest import load_manifest, now
from eyas.operate.codec_result import RESULT
from eyas.operate.pipeline import open_run
from eyas.operate.rehearsal import first_replies, small_config
from eyas.progress import Report, silent
from eyas.target.precision import native_dtype
from eyas.target.spec import load_target
from eyas.target.weights import TargetHead, load_head
from eyas.workspace import RunFolder, exclusive

RECORDS = 200
FOLDER = "codec-probe"
MAX_AUX_ERROR = 0.15
"""Of each of the three states, all channels at equal weight; int4 on SmolLM2-135M: 0.11, and 0.8 % of the accept length."""
MAX_CHANGE = 0.01
GENERATED = 256
"""Generated tokens of a reply that are replayed, each of which goes through the target's head."""
POSITIONS = 40
"""Of them, those whose tokens are compared for every codec, evenly spaced."""
_SAMPLES = 2000


def probe_codecs(run: RunFolder, config: RunConfig, *, report: Report = silent) -> dict[str, Any]:
    """Measure every codec on `RECORDS` replies; writes and returns `hidden/codecs.json`.

    Raises `ArtifactError` while there is no reply, `ConfigError` where no codec can hold this target's states, and the
    `EyasError` of an extraction that fails.
    """
    spec = load_target(config.target)
    if spec.hidden_size % BLOCK:
        raise ConfigError(
            f"the codecs take {BLOCK} channels together and the target's hidden size is {spec.hidden_size}; keep bf16"
        )
    small = RunFolder(run.root / FOLDER)
    with exclusive(run.root / f".{FOLDER}.lock", f"the codec probe of {run.root}"):
        shutil.rmtree(small.root, ignore_errors=True)
        taken = first_replies(run, config, small, wanted=_shares(run, config), holds_out=False)
        exact = small_config(config, taken, draft={})
        exact = exact.model_copy(update={"hidden": exact.hidden.model_copy(update={"codec": "bf16"})})
        extract(open_run(small.root, exact), exact, report)
        result = measure(run, small, exact)
        write_json(run.hidden / RESULT, result)
        shutil.rmtree(small.root)
    return result


def aux_errors(exact: torch.Tensor, decoded: torch.Tensor) -> list[float]:
    """Relative error of each of the three states, aux [N, 3H] against its decoded copy, with all channels at equal weight."""
    sizes = exact.float().square().mean(0).sqrt().clamp(min=1e-9)  # [3H]
    misses = ((decoded.float() - exact.float()) / sizes).square().mean(0)
    return [float(part.mean().sqrt()) for part in misses.chunk(3)]


def _shares(run: RunFolder, config: RunConfig) -> dict[str, int]:
    """Replies of each dataset, in parts as equal as their sizes allow."""
    sizes = {item.name: load_manifest(run.prompts(item.name)).counts.done for item in config.prompts.datasets}
    shares: dict[str, int] = {}
    for left, name in zip(range(len(sizes), 0, -1), sorted(sizes, key=lambda name: sizes[name]), strict=True):
        shares[name] = min(sizes[name], -(-(RECORDS - sum(shares.values())) // left))
    return shares


@dataclass
class _Tally:
    """What one codec did so far."""

    squares: list[float] = field(default_factory=lambda: [0.0] * 3)
    rows: int = 0
    agreed: int = 0
    ties: int = 0
    positions: int = 0
    kept_mass: list[float] = field(default_factory=list)
    replays: list[tuple[int, int]] = field(default_factory=list)
    encode_s: float = 0.0
    decode_s: float = 0.0


def measure(run: RunFolder, small: RunFolder, config: RunConfig) -> dict[str, Any]:
    """The figures of every codec on the exact states that `small` holds, with map and draft of `run`."""
    spec = load_target(config.target)
    head = load_head(spec, torch.float32)
    top_targets = _top_targets(run, head)
    found = _draft_of(run, head)
    codecs: list[CodecName] = [
        name for name, codec in CODECS.items() if name != "bf16" and (codec.final is not None or top_targets is not None)
    ]
    tallies: dict[str, _Tally] = {name: _Tally() for name in ("bf16", *codecs)}
    store = HiddenStore(small.hidden)
    for path in sorted(small.hidden.glob("shard-*.json")):
        entry = load_entry(path)
        opened = open_shard(small.hidden, entry, store.kind, checks_digest=True)
        shard = opened.read()
        aux, final, mask = shard["aux"], shard["final"], shard["loss_mask"]
        decoded = {"bf16": aux}
        finals: dict[str, torch.Tensor] = {}
        for name in codecs:
            tally, number = tallies[name], CODECS[name].final
            start = time.perf_counter()
            coded = encode_states(aux, final, mask, name, top_targets)
            middle = time.perf_counter()
            decoded[name] = decode("aux", coded, slice(None), CODECS[name].aux)
            if number is not None:
                finals[name] = decode("final", coded, slice(None), number)
            else:
                tally.kept_mass += coded["top_logs"][mask.bool()].float().exp().sum(-1).tolist()
            tally.encode_s, tally.decode_s = tally.encode_s + middle - start, tally.decode_s + time.perf_counter() - middle
            errors = aux_errors(aux, decoded[name])
            tally.squares = [old + error**2 * len(aux) for old, error in zip(tally.squares, errors, strict=True)]
            tally.rows += len(aux)
        for rows in _records(opened.offsets, mask):
            _compare_tokens(final[rows], mask[rows], {name: part[rows] for name, part in finals.items()}, head, tallies)
            if found is not None:
                record = Record(
                    id="", dataset="", tokens=shard["tokens"][rows], loss_mask=mask[rows], aux=aux[rows], final=final[rows]
                )
                _replay(found, record, {name: part[rows] for name, part in decoded.items()}, head, config, tallies)
    return {
        "at": now(),
        "target": spec.fingerprint,
        "source": config.hidden.source,
        "records": len(store),
        "tokens": sum(map(store.num_tokens, store.ids())),
        "draft": found.name if found else None,
        "codecs": {name: _row(name, tallies, spec.hidden_size, config, len(store)) for name in codecs},
    }


def _records(offsets: torch.Tensor, mask: torch.Tensor) -> Iterator[slice]:
    """Rows of each reply, its first `GENERATED` generated tokens at most."""
    for start, end in pairwise(offsets.tolist()):
        prompt = int(mask[start:end].int().argmax())
        yield slice(start, min(end, start + prompt + GENERATED))


def _top_targets(run: RunFolder, head: TargetHead) -> TopTargets | None:
    """For the merged vocabulary, in which alone int4_top can count; None before the merge."""
    try:
        kept, _ = read_map(run)
    except ConfigError:
        return None
    return TopTargets(lm_head=head.lm_head, kept=kept)


@dataclass(frozen=True)
class _FoundDraft:
    name: str
    draft: Draft
    rows: TargetRows


def _draft_of(run: RunFolder, head: TargetHead) -> _FoundDraft | None:
    """The run's trained draft, else its baseline, else none."""
    for folder in (run.export, run.baseline):
        if (folder / "manifest.json").is_file():
            spec, tensors = load_export(folder)
            draft = make_draft(spec, tensors, head.embed_tokens.to(getattr(torch, native_dtype())))
            return _FoundDraft(str(folder.relative_to(run.root)), draft, TargetRows.of(head.lm_head, tensors["d2t"]))
    return None


def _compare_tokens(
    final: torch.Tensor, mask: torch.Tensor, decoded: dict[str, torch.Tensor], head: TargetHead, tallies: dict[str, _Tally]
) -> None:
    """Whether lm_head of decoded states [T, H] gives the token of the exact ones, at rows before generated ids."""
    rows = mask[1:].nonzero()[:, 0]
    rows = rows[torch.linspace(0, len(rows) - 1, min(POSITIONS, len(rows))).long()]
    logits = final[rows].float() @ head.lm_head.T  # [n, V]
    top, tokens = logits.max(-1)
    for name, states in decoded.items():
        guess = (states[rows].float() @ head.lm_head.T).argmax(-1)
        gap = top - logits.gather(1, guess[:, None])[:, 0]
        is_hit = guess == tokens
        tallies[name].agreed += int(is_hit.sum())
        tallies[name].ties += int((~is_hit & (gap <= TIE_SHARE * top.abs())).sum())
        tallies[name].positions += len(rows)


def _replay(
    found: _FoundDraft,
    record: Record,
    decoded: dict[str, torch.Tensor],
    head: TargetHead,
    config: RunConfig,
    tallies: dict[str, _Tally],
) -> None:
    """Counts of the draft's chain on one reply for each codec's aux states [T, 3H], against the exact target."""
    num_steps = config.benchmark.num_draft_tokens
    argmax: torch.Tensor | None = None
    for name, aux in decoded.items():
        batch = make_batch([Record(**{**vars(record), "aux": aux})], num_steps)
        if argmax is None:
            argmax = target_argmax(batch.labels, head.lm_head, is_exact=True)
        counts = replay(found.draft, [(batch, argmax)], found.rows).overall
        tallies[name].replays.append((counts.verifications, counts.accepted))


def _row(name: CodecName, tallies: dict[str, _Tally], hidden_size: int, config: RunConfig, records: int) -> dict[str, Any]:
    tally, size = tallies[name], bytes_per_token(hidden_size, name)
    has_final = CODECS[name].final is not None
    gigabytes = tally.rows * 8 * hidden_size / 1e9
    row: dict[str, Any] = {
        "bytes_per_token": size,
        "share_of_bf16": round(size / bytes_per_token(hidden_size, "bf16"), 4),
        "aux_error": [round((square / max(1, tally.rows)) ** 0.5, 4) for square in tally.squares],
        "agreement": round(tally.agreed / max(1, tally.positions), 4) if has_final else None,  # int4_top stores the token itself
        "ties": round(tally.ties / max(1, tally.positions), 4) if has_final else None,
        "kept_mass": None if has_final else round(float(np.mean(tally.kept_mass)), 4),
        "replay": _change(tally.replays, tallies["bf16"].replays) if tally.replays else None,
        "encode_gb_per_s": round(gigabytes / max(tally.encode_s, 1e-9), 3),
        "decode_gb_per_s": round(gigabytes / max(tally.decode_s, 1e-9), 3),
    }
    return row | {"faults": _faults(row, config.hidden.min_greedy_agreement, records)}


def _change(ours: Sequence[tuple[int, int]], exact: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Relative change of the accept length, paired by reply, and its 95 % interval (bootstrap over replies)."""
    pairs = np.array([[*a, *b] for a, b in zip(ours, exact, strict=True)], dtype=np.float64)  # [replies, 4]
    drawn = np.random.default_rng(0).integers(0, len(pairs), (_SAMPLES, len(pairs)))
    lengths = [1 + sums[..., 1::2] / np.maximum(sums[..., 0::2], 1) for sums in (pairs.sum(0), pairs[drawn].sum(1))]
    (mine, other), resampled = lengths[0], lengths[1][:, 0] / lengths[1][:, 1] - 1
    return {
        "exact": round(float(other), 4),
        "decoded": round(float(mine), 4),
        "change": round(float(mine / other - 1), 4),
        "interval_95": [round(float(value), 4) for value in np.quantile(resampled, [0.025, 0.975])],
        "verifications": int(pairs[:, 2].sum()),
    }


def _faults(row: dict[str, Any], wanted: float, records: int) -> list[str]:
    """Why a codec does not pass; empty where it does."""
    faults = []
    if records < RECORDS:
        faults.append(f"{records} of {RECORDS} replies")
    if max(row["aux_error"]) > MAX_AUX_ERROR:
        faults.append(f"states off by {max(row['aux_error']):.1%}, at most {MAX_AUX_ERROR:.0%}")
    if row["agreement"] is not None and row["agreement"] + row["ties"] < wanted:
        faults.append(f"the target's token at {row['agreement'] + row['ties']:.2%}, wanted {wanted:.0%}")
    if row["replay"] and abs(row["replay"]["change"]) > MAX_CHANGE:
        faults.append(f"accept length {row['replay']['change']:+.1%}, at most {MAX_CHANGE:.0%} either way")
    return faults
