"""The training loop of one process among equals: batches, optimizer steps, replays, checkpoints, metrics.

One optimizer step takes `accumulate` packed batches, dealt out among the processes; each unroll step's loss is
divided by its kept rows over all of them, so that any number of processes gives the same curve to rounding. The
target's full-vocabulary argmax, needed to drop rows that the draft cannot say, is made once per record and kept
(4 bytes a token). The first process writes; what it writes knows nothing of the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eyas.draft.checkpoint import (
    Checkpoint,
    TrainerState,
    clear_other_trainings,
    load_checkpoint,
    load_latest,
    point_at_best,
    save_checkpoint,
)
from eyas.draft.config import DraftConfig
from eyas.draft.corpus import Corpus, read_ahead
from eyas.draft.data import Batch
from eyas.draft.initial import continue_from, initialise
from eyas.draft.loss import LossResult, TargetRows, kept_rows, unrolled_loss
from eyas.draft.metrics import Metrics, Window, dataset_figures
from eyas.draft.model import Draft, rms_norm
from eyas.draft.optimizer import MasterAdamW, learning_rate, num_micro_steps
from eyas.draft.replay import ReplayCounts, ReplayResult, replay
from eyas.draft.spec import DraftSpec
from eyas.draft.world import World
from eyas.errors import EyasError
from eyas.files import write_json
from eyas.progress import Progress, Report
from eyas.target.precision import native_dtype
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head

logger = logging.getLogger(__name__)

DUMP = "nonfinite.json"
SAMPLE_COLUMNS = 32_768
"""Columns of the regression that the start is solved from."""
SKIP_REASONS = ("no_supervised_token", "outside_draft_vocabulary")
"""Why a batch teaches nothing: no generated token to predict, or none that the draft can say."""
HIT_EVERY = 4
"""Training counts hits on every fourth step only: the argmax over D costs a pass over the logits."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """This process's batches of one optimizer step, and where the data stand after it."""

    batches: list[tuple[Batch, torch.Tensor]]
    spare: tuple[Batch, torch.Tensor]
    """One to compute without effect where the others have more."""
    epoch: int
    num_done: int


class Trainer:
    """Trains one draft in `folder`; `state` says how far it is."""

    def __init__(
        self,
        *,
        folder: Path,
        corpus: Corpus,
        target: TargetSpec,
        spec: DraftSpec,
        config: DraftConfig,
        num_draft_tokens: int,
        fingerprint: str,
        world: World | None = None,
        start: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.folder, self.corpus, self.config, self.spec = folder, corpus, config, spec
        self.world = world = world or World()
        self.num_draft_tokens = num_draft_tokens
        self.checkpoints = folder / "checkpoints"
        found = self._newest(fingerprint)
        if config.threads or world.size > 1:
            torch.set_num_threads(config.threads or max(1, torch.get_num_threads() // world.local_size))
        dtype = world.same(lambda: found.state.dtype if found else config.dtype if config.dtype != "auto" else native_dtype())
        self.dtype: torch.dtype = getattr(torch, dtype)
        head = load_head(target, self.dtype)
        self.draft = Draft(spec, head.embed_tokens)
        self.first_epoch = corpus.epoch(0, config.seed, config.batch_tokens)
        if found is None:
            rows = TargetRows.of(head.lm_head, corpus.d2t, has_states=corpus.has_states)
            if start is None:
                scales = world.same(lambda: initialise(self.draft, head, rows, config.seed, self._sample()))
            else:
                scales = world.same(lambda: continue_from(self.draft, start, head, self._sample()))
            self.state = TrainerState(fingerprint=fingerprint, dtype=dtype, rate_scales=scales)
        else:
            self.state = found.state
        self.draft.cast(torch.float32, world.device)
        self.draft.embed_tokens = head.embed_tokens.to(world.device)
        self.lm_head = self.draft.embed_tokens if head.lm_head is head.embed_tokens else head.lm_head.to(world.device)
        self.rows = TargetRows.of(self.lm_head, corpus.d2t, has_states=corpus.has_states)
        for parameter in self.draft.parameters():
            world.spread(parameter.data)
        self.optimizer = self._optimizer()
        if found is not None:
            self.optimizer.load(found.masters, found.optimizer)
            logger.info("resumed step=%d epoch=%d batch=%d", self.state.step, self.state.epoch, self.state.batch)
        self.step_weights = config.step_decay ** torch.arange(config.num_unroll_steps, dtype=torch.float32, device=world.device)
        self.argmax: dict[str, torch.Tensor] = {}
        self.total_steps = config.max_steps or max(1, round(config.epochs * math.ceil(len(self.first_epoch) / config.accumulate)))
        self.last_replay: ReplayResult | None = None
        self.metrics: Metrics | None = None

    def run(self, report: Report, should_stop: Callable[[], bool]) -> bool:
        """Train to the end; False if `should_stop` of any process ended it earlier (the state is saved)."""
        self.metrics = Metrics(self.folder, self.config, self.state.step) if self.world.is_first else None
        try:
            is_done = self.state.step >= self.total_steps or self._is_out_of_patience() or self._run(report, should_stop)
        finally:
            if self.metrics is not None:
                self.metrics.close()
        if is_done:
            report(self._progress({}, is_final=True))
        return is_done

    def _run(self, report: Report, should_stop: Callable[[], bool]) -> bool:
        config, state = self.config, self.state
        started, seconds_before = time.monotonic(), state.seconds
        window = Window()
        with closing(self._groups()) as groups:
            for group in groups:
                if int(self.world.sum(torch.tensor(int(should_stop()), device=self.world.device))):
                    self._save(is_best=False)
                    return False
                window.add(self._step(group, window))
                state.seconds = seconds_before + time.monotonic() - started
                is_last = state.step >= self.total_steps
                if state.step % config.log_every == 0 or is_last:
                    figures = window.figures()
                    figures["per_dataset"] = dataset_figures(
                        self.world.gather({name: sums.cpu() for name, sums in window.datasets.items()})
                    )
                    remaining_s = round((self.total_steps - state.step) * state.seconds / state.step, 1)
                    self._write_metrics({"kind": "train", **figures, "skipped": dict(state.skipped), "remaining_s": remaining_s})
                    shown = {name: figures[name] for name in ("loss", "positions_per_s")}
                    report(self._progress({**shown, "remaining_s": remaining_s}))
                    window = Window()
                if state.step % config.eval_every == 0 or is_last:
                    self._save(is_best=self._evaluate())
                    window = Window()
                    if is_last or self._is_out_of_patience():
                        break
        return True

    def figures(self) -> dict[str, Any]:
        """What the manifest says of the training."""
        state = self.state
        return {
            "accept_length": round(state.best_accept_length, 4),
            "best_step": state.best_step,
            "steps": state.step,
            "epochs": state.epoch,
            "positions": state.positions,
            "seconds": round(state.seconds, 1),
            "positions_per_s": round(state.positions / state.seconds, 1) if state.seconds else 0.0,
            "skipped_batches": sum(state.skipped.values()),
            "processes": self.world.size,
            "parameters": self.spec.num_parameters,
            "dtype": state.dtype,
        }

    def _sample(self) -> Generator[Batch, None, None]:
        """The first batches of training, until they hold `SAMPLE_COLUMNS` supervised columns."""
        columns = 0
        batches = read_ahead(self.corpus, self.first_epoch, 1)
        for batch in batches:
            if len(batch.active):
                yield batch
            columns += len(batch.active)
            if columns >= SAMPLE_COLUMNS:
                break

    def _newest(self, fingerprint: str) -> Checkpoint | None:
        """The newest whole checkpoint of this training; the first process finds it, after clearing what others left."""
        found: Checkpoint | None = None
        if self.world.is_first:
            clear_other_trainings(self.checkpoints, fingerprint)
            found = load_latest(self.checkpoints, fingerprint)
            if found is not None:
                point_at_best(self.checkpoints, found.state)
        folder = self.world.same(lambda: found.folder if found else None)
        return found if self.world.is_first or folder is None else load_checkpoint(folder)

    def _optimizer(self) -> Any:
        """`MasterAdamW`, or the same divided among processes; alone there is nothing to divide."""
        if self.config.zero_stage and self.world.size > 1:
            from eyas.draft.zero import ZeroAdamW

            return ZeroAdamW(self.draft, self.config, self.dtype, self.state.rate_scales, self.world)
        return MasterAdamW(self.draft, self.config, self.dtype, self.state.rate_scales, self.world)

    # one optimizer step

    def _step(self, group: _Group, window: Window) -> dict[str, Any]:
        config, state, device = self.config, self.state, self.world.device
        begun = time.monotonic()
        none = torch.zeros(config.num_unroll_steps, dtype=torch.int64, device=device)
        kept_here = [kept_rows(batch.supervised, argmax, self.rows).sum(1) for batch, argmax in group.batches]
        kept = self.world.sum(sum(kept_here, none.clone()))
        weights = self.step_weights / kept.clamp(min=1)
        wants_hits = state.step % HIT_EVERY == 0
        teaching = [item for item, rows in zip(group.batches, kept_here, strict=True) if rows[0]]
        results = [self.optimizer.run(partial(self._loss, *item, weights, wants_hits)) for item in teaching]
        window.add_datasets(zip((batch for batch, _ in teaching), results, strict=True))
        if self.optimizer.wants_equal_steps:
            for _ in range(num_micro_steps(config, self.world) - len(teaching)):
                self.optimizer.run(partial(self._loss, *group.spare, 0 * weights, False))
        empty = sum(not batch.num_supervised for batch, _ in group.batches)
        counts = [sum(batch.num_positions for batch, _ in group.batches), empty, len(group.batches) - len(teaching) - empty]
        sums = self.world.sum(
            torch.cat(
                [
                    sum((result.loss.detach().double() for result in results), none[:1].double()),
                    *(
                        sum((getattr(result, name) for result in results), none.double())
                        for name in ("step_loss", "supervised", "hits")
                    ),
                    torch.tensor(counts, dtype=torch.float64, device=device),
                ]
            )
        ).cpu()
        loss, positions = float(sums[0]), int(sums[-3])
        step_loss, supervised, hits = sums[1:-3].view(3, -1)
        if not math.isfinite(loss):
            bad = [batch for (batch, _), result in zip(teaching, results, strict=True) if not torch.isfinite(result.loss.detach())]
            self._stop_not_finite("loss", loss, bad)
        rate = learning_rate(state.step, self.total_steps, config)
        norm = self.optimizer.step(rate)
        if not math.isfinite(norm):
            self._stop_not_finite("gradient norm", norm, [batch for batch, _ in group.batches])
        state.step += 1
        state.epoch, state.batch = group.epoch, group.num_done
        state.positions += positions
        for reason, count in zip(SKIP_REASONS, sums[-2:].tolist(), strict=True):
            if count:
                state.skipped[reason] = state.skipped.get(reason, 0) + int(count)
        return {
            "loss": loss,
            "step_loss": step_loss,
            "kept": kept.cpu(),
            "supervised": supervised,
            "hits": hits if wants_hits else None,
            "grad_norm": norm,
            "learning_rate": rate,
            "positions": positions,
            "seconds": time.monotonic() - begun,
        }

    def _loss(self, batch: Batch, argmax: torch.Tensor, weights: torch.Tensor, wants_hits: bool) -> LossResult:
        draft = self.draft
        states = draft.unroll(batch, self.config.num_unroll_steps, recompute=self.config.recompute)
        return unrolled_loss(
            rms_norm(states, draft.norm.weight, self.spec.rms_norm_eps),
            draft.lm_head.weight,
            batch.labels,
            argmax,
            batch.supervised,
            self.rows,
            step_weights=weights,
            wants_hits=wants_hits,
            objective=self.config.objective,
        )

    # data

    def _groups(self) -> Generator[_Group, None, None]:
        """Batches of this process with their argmax, group by group, from the state's position on.

        A group is `accumulate` batches over all processes (fewer at an epoch's end); of it, every `size`-th is ours.
        """
        size, rank = self.config.accumulate, self.world.rank
        epoch, num_done = self.state.epoch, self.state.batch
        while True:
            lists = self.corpus.epoch(epoch, self.config.seed, self.config.batch_tokens) if epoch else self.first_epoch
            groups = [lists[start : start + size] for start in range(num_done, len(lists), size)]
            ours = [group[rank :: self.world.size] for group in groups]
            needed = [ids for group, part in zip(groups, ours, strict=True) for ids in part or group[:1]]
            with closing(read_ahead(self.corpus, needed, self.config.num_unroll_steps, self.world.device)) as batches:
                for group, part in zip(groups, ours, strict=True):
                    found = [(batch, self._argmax(batch, is_exact=False)) for batch in islice(batches, len(part) or 1)]
                    num_done += len(group)
                    yield _Group(batches=found[: len(part)], spare=found[-1], epoch=epoch, num_done=num_done)
            epoch, num_done = epoch + 1, 0

    def _argmax(self, batch: Batch, *, is_exact: bool) -> torch.Tensor:
        """The target's full-vocabulary argmax of the batch's label rows, from memory where a record was seen before."""
        pieces = []
        for record_id, segment in zip(batch.segment_ids, batch.segments, strict=True):
            if record_id not in self.argmax:
                rows = batch.labels[segment.query_start : segment.query_end]
                self.argmax[record_id] = self.rows.argmax(rows, self.lm_head, is_exact=is_exact).int()
            pieces.append(self.argmax[record_id])
        return torch.cat(pieces).long()

    # selection

    def _evaluate(self) -> bool:
        """Replay the held-out replies; True if this is the best so far."""
        config, state = self.config, self.state
        lists = self.corpus.pack(self.corpus.heldout[: config.eval_records], config.batch_tokens)
        batches = read_ahead(self.corpus, lists[self.world.rank :: self.world.size], self.num_draft_tokens, self.world.device)
        with self.optimizer.whole_weights():
            ours = replay(self.draft, ((batch, self._argmax(batch, is_exact=True)) for batch in batches), self.rows)
        per_dataset: dict[str, ReplayCounts] = defaultdict(ReplayCounts)
        for part in self.world.gather(ours.per_dataset):
            for name, counts in part.items():
                per_dataset[name] += counts
        result = ReplayResult(overall=sum(per_dataset.values(), ReplayCounts()), per_dataset=dict(per_dataset))
        self.last_replay = result
        length = result.overall.accept_length
        is_best = state.best_step < 0 or length > state.best_accept_length
        state.stale_replays = 0 if is_best else state.stale_replays + 1
        if is_best:
            state.best_step, state.best_accept_length = state.step, length
        self._write_metrics(
            {
                "kind": "heldout",
                "accept_length": round(length, 4),
                "verifications": result.overall.verifications,
                "accepted": result.overall.accepted,
                "step_accuracy": [round(value, 4) for value in result.overall.step_accuracy],
                "per_dataset": {
                    name: {
                        "accept_length": round(counts.accept_length, 4),
                        "verifications": counts.verifications,
                        "accepted": counts.accepted,
                        "step_accuracy": [round(value, 4) for value in counts.step_accuracy],
                    }
                    for name, counts in sorted(result.per_dataset.items())
                },
                "is_best": is_best,
            }
        )
        logger.info("replay step=%d accept_length=%.4f best=%s", state.step, length, is_best)
        return is_best

    def _is_out_of_patience(self) -> bool:
        return bool(self.config.patience) and self.state.stale_replays >= self.config.patience

    # files

    def _save(self, *, is_best: bool) -> None:
        """Write a checkpoint of whole tensors; all processes take part and leave together."""
        masters, moments = self.optimizer.snapshot()
        keep = self.config.keep_checkpoints
        self.world.same(lambda: save_checkpoint(self.checkpoints, self.state, masters, moments, is_best=is_best, keep=keep))

    def _progress(self, figures: dict[str, float | int | str], *, is_final: bool = False) -> Progress:
        """Where the training stands, with the best accept length once there is one."""
        if self.state.best_step >= 0:
            figures = {**figures, "accept_length": self.state.best_accept_length}
        return Progress(
            stage="train", done=self.state.step, total=self.total_steps, unit="steps", figures=figures, is_final=is_final
        )

    def _write_metrics(self, figures: dict[str, Any]) -> None:
        if self.metrics is not None:
            state = self.state
            self.metrics.write({"step": state.step, "epoch": state.epoch, "seconds": round(state.seconds, 2), **figures})

    def _stop_not_finite(self, what: str, value: float, batches: list[Batch]) -> None:
        ids = [record_id for found in self.world.gather([item for batch in batches for item in batch.ids]) for record_id in found]
        dump = self.folder / DUMP
        if self.world.is_first:
            write_json(dump, {"step": self.state.step, "epoch": self.state.epoch, "what": what, "value": str(value), "ids": ids})
        raise EyasError(
            f"{what} is {value} at step {self.state.step} on records {', '.join(ids[:8])} (all {len(ids)} in {dump}); "
            "lower draft.learning_rate or inspect these records; the last checkpoint is kept"
        )
