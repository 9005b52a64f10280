"""What each codec of hidden states costs and keeps, on the exact states and the trained draft of a finished run.

    python -m benchmarks.codecs --run RUN [--seeds 5] [--steps 300] [--solved-start] [--to build/codecs.jsonl]

Per codec: bytes a token here and at H = 7168 beside the peers' 8·H + 16; encode and decode speed in GB/s of
bf16 states, one thread; relative error of each aux state with all channels at equal weight, and of the final
state; accept length of the run's best draft replayed on decoded aux states against the exact target (goal: within
1 %); and accept length, replayed on exact states, of drafts trained from it, paired by seed with drafts
trained from exact states, with a 95 % interval of the difference. Unless `--solved-start` is given every
training starts from random weights, as at H above 4,096, since top-k probabilities allow no other.
Every measurement is a line of `--to`, and what stands there is not made again: the same command goes on after a kill, and
one with more seeds adds those.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.config import parse_config
from eyas.draft import initial
from eyas.draft.checkpoint import load_checkpoint, named_checkpoint
from eyas.draft.corpus import Corpus
from eyas.draft.data import Batch, make_batch
from eyas.draft.loss import TargetRows, target_argmax
from eyas.draft.model import Draft
from eyas.draft.replay import replay
from eyas.draft.spec import DraftSpec
from eyas.draft.trainer import Trainer
from eyas.files import digest_file, read_json, read_json_lines
from eyas.hidden.codec import CODECS, TOP, CodecName, bytes_per_token
from eyas.hidden.store.codecs import decode, encode_states, layout
from eyas.hidden.store.reader import HiddenStore
from eyas.hidden.store.shard import Shard, load_entry, open_shard
from eyas.hidden.store.top import TopTargets
from eyas.manifest import load_manifest
from eyas.progress import silent
from eyas.target.spec import load_target
from eyas.target.weights import load_head
from eyas.workspace import RunFolder

PEER_HIDDEN_SIZE = 7168
_STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantile of Student's distribution with 1 to 9 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Recoded(Shard):
    """An open shard whose rows lie in memory."""

    coded: dict[str, torch.Tensor]

    def read(self, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """See `Shard.read`."""
        return self.shared | {name: tensor[start:end] for name, tensor in self.coded.items()}


class RecodedStore(HiddenStore):
    """An exact store that reads as if it had been written with another codec."""

    def __init__(self, folder: Path, codec: CodecName, top_targets: TopTargets, vocabulary: str) -> None:
        super().__init__(folder, checks_digests=False)
        self._exact, self._top_targets = self.kind, top_targets
        top = {"vocabulary": vocabulary, "num_top": min(TOP, len(top_targets.kept))} if CODECS[codec].final is None else {}
        self.kind = self.kind.model_copy(update={"codec": codec, **top})

    def _open(self, shard: str) -> Shard:
        with self._lock:
            if shard not in self._shards:
                opened = open_shard(self.folder, load_entry(self.folder / f"{shard}.json"), self._exact, checks_digest=False)
                exact = opened.read()
                coded = encode_states(exact["aux"], exact["final"], exact["loss_mask"], self.kind.codec, self._top_targets)
                kept = {name: exact[name] for name in ("tokens", "loss_mask")} | coded
                names = set(layout(self.kind.codec, self.hidden_size, self.kind.num_top)[1])
                self._shards[shard] = Recoded(**vars(opened) | {"shared": {name: kept.pop(name) for name in names}}, coded=kept)
            return self._shards[shard]


class Bench:
    """One run, opened once."""

    def __init__(self, folder: Path, num_records: int) -> None:
        self.run = RunFolder(folder)
        self.config = parse_config(read_json(self.run.run_json)["config"], where=str(self.run.run_json))
        self.target = load_target(self.config.target)
        self.exact = Corpus.open(self.run)
        if self.exact.store.kind.codec != "bf16":
            raise SystemExit(f"{folder} stores {self.exact.store.kind.codec}; this benchmark starts from exact states (bf16)")
        self.spec = DraftSpec.from_target(self.target, self.config.draft, len(self.exact.d2t))
        self.head = load_head(self.target, torch.bfloat16)
        self.rows = TargetRows.of(self.head.lm_head, self.exact.d2t)
        kept = torch.arange(len(self.exact.d2t)) + self.exact.d2t
        self.top_targets = TopTargets(lm_head=load_head(self.target, torch.float32).lm_head, kept=kept)
        self.vocabulary = digest_file(self.run.merged / "vocab_map.safetensors")
        self.heldout = self.exact.heldout[:num_records]
        self.num_steps = self.config.benchmark.num_draft_tokens
        self._argmax: dict[tuple[str, ...], torch.Tensor] = {}
        self._recoded: dict[CodecName, Corpus] = {"bf16": self.exact}

    def corpus(self, codec: CodecName) -> Corpus:
        """The run's records as they would read from a store of `codec`."""
        if codec not in self._recoded:
            store = RecodedStore(self.run.hidden, codec, self.top_targets, self.vocabulary)
            self._recoded[codec] = dataclasses.replace(self.exact, store=store)
        return self._recoded[codec]

    def replayed(self, draft: Draft, aux_from: Corpus) -> float:
        """Accept length on held-out replies: aux states as decoded, targets exact."""
        return replay(draft, self._batches(aux_from), self.rows).overall.accept_length

    def _batches(self, aux_from: Corpus) -> Iterator[tuple[Batch, torch.Tensor]]:
        for ids in self.exact.pack(self.heldout, self.config.draft.batch_tokens):
            records = [
                dataclasses.replace(self.exact.record(record_id), aux=aux_from.record(record_id).aux.to(torch.bfloat16))
                for record_id in ids
            ]
            batch = make_batch(records, self.num_steps)
            if batch.ids not in self._argmax:
                self._argmax[batch.ids] = target_argmax(batch.labels, self.head.lm_head, is_exact=True)
            yield batch, self._argmax[batch.ids]

    def best_draft(self) -> Draft:
        draft = Draft(self.spec, self.head.embed_tokens)
        best = named_checkpoint(self.run.draft / "checkpoints", "best")
        draft.load_state_dict(load_checkpoint(best).masters)
        return draft.to(torch.bfloat16)

    def trained(self, codec: CodecName, seed: int, steps: int) -> float:
        """Accept length, on exact states, of a draft trained from a codec's."""
        settings = self.config.draft.model_copy(
            update={"seed": seed, "max_steps": steps, "eval_every": steps, "eval_records": 1, "threads": 1}
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                folder=Path(folder),
                corpus=self.corpus(codec),
                target=self.target,
                spec=self.spec,
                config=settings,
                num_draft_tokens=self.num_steps,
                fingerprint="0" * 64,
            )
            trainer.run(silent, lambda: False)
        return self.replayed(trainer.draft, self.exact)


def speed_and_error(bench: Bench, codec: CodecName) -> dict[str, object]:
    """Encode and decode speed over the first shard, and the errors of what comes back."""
    store = bench.exact.store
    shard = next(iter(sorted(bench.run.hidden.glob("shard-*.json")))).stem
    exact = open_shard(store.folder, load_entry(store.folder / f"{shard}.json"), store.kind, checks_digest=False).read()
    rows = slice(0, 8192)
    aux, final, mask = (exact[name][rows].clone() for name in ("aux", "final", "loss_mask"))
    start = time.perf_counter()
    coded = encode_states(aux, final, mask, codec, bench.top_targets)
    encoded = time.perf_counter()
    decoded = decode("aux", coded, rows, CODECS[codec].aux)
    number = CODECS[codec].final
    decoded_final = None if number is None else decode("final", coded, rows, number)
    done = time.perf_counter()
    size = (aux.nbytes + (final.nbytes if number else 0)) / 1e9
    is_copied = codec != "bf16"
    final_error = None
    if decoded_final is not None:
        final_error = round(float((decoded_final.float() - final.float()).norm() / final.float().norm()), 4)
    channels = aux.float().square().mean(0).sqrt().clamp(min=1e-9)
    errors = [
        float((part / sizes).norm() / (whole.float() / sizes).norm())
        for part, whole, sizes in zip(
            (decoded.float() - aux.float()).chunk(3, -1), aux.chunk(3, -1), channels.chunk(3), strict=True
        )
    ]
    return {
        "encode_gb_per_s": round((aux.nbytes + final.nbytes) / 1e9 / (encoded - start), 3) if is_copied else None,
        "decode_gb_per_s": round(size / (done - encoded), 3) if is_copied else None,
        "aux_error": [round(error, 4) for error in errors],
        "final_error": final_error,
    }


class Kept:
    """Measurements as lines of a file: `what` is made once under the same `settings`, then read."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self._path, self._settings = path, settings
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        rows = [json.loads(line) for _, line in read_json_lines(path)]
        self._found = {tuple(row["what"]): row["value"] for row in rows if row["settings"] == settings}

    def get(self, what: tuple[str | int, ...], make: Callable[[], Any]) -> Any:
        if what not in self._found:
            self._found[what] = make()
            with open(self._path, "a") as file:
                file.write(json.dumps({"settings": self._settings, "what": what, "value": self._found[what]}) + "\n")
        return self._found[what]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="finished run with exact states and a trained draft")
    parser.add_argument("--records", type=int, default=128, help="held-out replies that are replayed")
    parser.add_argument("--seeds", type=int, default=5, choices=range(11), help="paired trainings per codec; 0 trains nothing")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each training")
    parser.add_argument("--solved-start", action="store_true", help="start trainings as usual; leaves int4_top out")
    parser.add_argument(
        "--to", type=Path, default=Path("build/codecs.jsonl"), help="file of measurements; those there are not repeated"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.run, arguments.records)
    settings = {
        "draft": load_manifest(bench.run.draft).fingerprint,
        **{name: getattr(arguments, name) for name in ("records", "steps", "solved_start")},
    }
    kept = Kept(arguments.to, settings)
    draft = bench.best_draft()
    if not arguments.solved_start:
        initial.MAX_HIDDEN_SIZE = 0
    trained = [codec for codec in CODECS if not (arguments.solved_start and CODECS[codec].final is None)]
    lengths: dict[CodecName, list[float]] = {codec: [] for codec in trained}
    for seed in range(arguments.seeds):
        for codec in trained:
            lengths[codec].append(kept.get((codec, "trained", seed), partial(bench.trained, codec, seed, arguments.steps)))
    baseline = kept.get(("bf16", "replayed"), lambda: bench.replayed(draft, bench.exact))
    for codec in CODECS:
        seen = kept.get((codec, "replayed"), lambda codec=codec: bench.replayed(draft, bench.corpus(codec)))
        line: dict[str, object] = {
            "codec": codec,
            "bytes_per_token": bytes_per_token(bench.target.hidden_size, codec),
            "bytes_per_token_7168": bytes_per_token(PEER_HIDDEN_SIZE, codec),
            "share_of_peers_7168": round(bytes_per_token(PEER_HIDDEN_SIZE, codec) / (8 * PEER_HIDDEN_SIZE + 16), 3),
            **kept.get((codec, "speed"), partial(speed_and_error, bench, codec)),
            "replayed_accept_length": round(seen, 4),
            "replay_change": round(seen / baseline - 1, 4),
        }
        if lengths.get(codec):
            line["trained_accept_length"] = [round(length, 4) for length in lengths[codec]]
            line |= _paired(lengths[codec], lengths["bf16"])
        print(json.dumps(line), flush=True)


def _paired(lengths: list[float], exact: list[float]) -> dict[str, object]:
    """Mean relative difference by seed and its 95 % interval (Student)."""
    changes = np.array(lengths) / np.array(exact) - 1
    if len(changes) < 2 or not changes.any():
        return {"trained_change": round(float(changes.mean()), 4)}
    mean, half = float(changes.mean()), _STUDENT_95[len(changes) - 2] * float(changes.std(ddof=1)) / len(changes) ** 0.5
    return {"trained_change": round(mean, 4), "interval_95": [round(mean - half, 4), round(mean + half, 4)]}


if __name__ == "__main__":
    main()
