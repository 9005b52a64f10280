"""The training loop on one device: batches, optimizer steps, replays, checkpoints, metrics.

One optimizer step takes `accumulate` packed batches; each unroll step's loss is divided by its kept rows over
all of them. The target's full-vocabulary argmax, needed to drop rows that the draft cannot say, is made
once per record and kept (4 bytes a token). Steps per second live from bf16 copies of fp32 masters.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.draft.checkpoint import Checkpoint, TrainerState, clear_other_trainings, load_latest, save_checkpoint
from eyas.draft.config import DraftConfig
from eyas.draft.corpus import Corpus, read_ahead
from eyas.draft.data import Batch
from eyas.draft.initial import initialise
from eyas.draft.loss import LossResult, TargetRows, kept_rows, unrolled_loss
from eyas.draft.model import Draft, rms_norm
from eyas.draft.optimizer import MasterAdamW, learning_rate
from eyas.draft.precision import fastest_dtype
from eyas.draft.replay import ReplayResult, replay
from eyas.draft.spec import DraftSpec
from eyas.errors import EyasError
from eyas.files import json_line, write_bytes, write_json
from eyas.progress import Progress, Report
from eyas.target.spec import TargetSpec
from eyas.target.weights import load_head

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
DUMP = "nonfinite.json"
SAMPLE_COLUMNS = 32_768
"""Columns of the regression that the start is solved from."""
HIT_EVERY = 4
"""Training counts hits on every fourth step only: the argmax over D costs a pass over the logits."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The batches of one optimizer step, and where the data stand after it."""

    batches: list[tuple[Batch, torch.Tensor]]
    epoch: int
    num_done: int
    num_skipped: int


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
    ) -> None:
        self.folder, self.corpus, self.config, self.spec = folder, corpus, config, spec
        self.num_draft_tokens = num_draft_tokens
        self.checkpoints = folder / "checkpoints"
        clear_other_trainings(self.checkpoints, fingerprint)
        found = load_latest(self.checkpoints, fingerprint)
        if config.threads:
            torch.set_num_threads(config.threads)
        dtype = found.state.dtype if found else config.dtype if config.dtype != "auto" else fastest_dtype(spec.hidden_size)
        self.dtype: torch.dtype = getattr(torch, dtype)
        head = load_head(target, self.dtype)
        self.lm_head = head.lm_head
        self.rows = TargetRows.of(head.lm_head, corpus.d2t, has_states=corpus.has_states)
        self.draft = Draft(spec, head.embed_tokens)
        self.first_epoch = corpus.epoch(0, config.seed, config.batch_tokens)
        if found is None:
            scales = initialise(self.draft, head, self.rows, config.seed, self._sample())
            self.state = TrainerState(fingerprint=fingerprint, dtype=dtype, rate_scales=scales)
        else:
            self.state = found.state
        self.optimizer = MasterAdamW(self.draft, config, self.dtype, self.state.rate_scales)
        self.step_weights = config.step_decay ** torch.arange(config.num_unroll_steps, dtype=torch.float32)
        self.argmax: dict[str, torch.Tensor] = {}
        self.total_steps = config.max_steps or max(1, round(config.epochs * math.ceil(len(self.first_epoch) / config.accumulate)))
        self.last_replay: ReplayResult | None = None
        if found is not None:
            self._resume(found)

    def run(self, report: Report, should_stop: Callable[[], bool]) -> bool:
        """Train to the end; False if `should_stop` ended it earlier (the state is saved)."""
        config = self.config
        self._cut_metrics()
        if self.state.step >= self.total_steps or self._is_out_of_patience():
            return True
        groups = self._groups()
        started, seconds_before = time.monotonic(), self.state.seconds
        window = _Window()
        for group in groups:
            if should_stop():
                self._save(is_best=False)
                return False
            window.add(self._step(group))
            state = self.state
            state.seconds = seconds_before + time.monotonic() - started
            is_last = state.step >= self.total_steps
            if state.step % config.log_every == 0 or is_last:
                figures = window.figures()
                self._write_metrics(
                    {"kind": "train", "step": state.step, "epoch": state.epoch, "seconds": round(state.seconds, 2), **figures}
                )
                report(
                    Progress(
                        stage="train",
                        done=state.step,
                        total=self.total_steps,
                        unit="steps",
                        figures={
                            "loss": figures["loss"],
                            "positions_per_s": figures["positions_per_s"],
                            "accept_length": state.best_accept_length,
                        },
                    )
                )
                window = _Window()
            if state.step % config.eval_every == 0 or is_last:
                is_best = self._evaluate()
                self._save(is_best=is_best)
                window = _Window()
                if is_last or self._is_out_of_patience():
                    break
        groups.close()
        report(
            Progress(
                stage="train",
                done=self.state.step,
                total=self.total_steps,
                unit="steps",
                figures={"accept_length": self.state.best_accept_length},
                is_final=True,
            )
        )
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
            "skipped_batches": state.skipped_batches,
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

    # one optimizer step

    def _step(self, group: _Group) -> dict[str, Any]:
        config, batches = self.config, group.batches
        begun = time.monotonic()
        kept = torch.stack([kept_rows(batch.supervised, argmax, self.rows).sum(1) for batch, argmax in batches]).sum(0)
        weights = self.step_weights / kept.clamp(min=1)
        wants_hits = self.state.step % HIT_EVERY == 0
        results = []
        for batch, argmax in batches:
            result = self._loss(batch, argmax, weights, wants_hits)
            if not math.isfinite(float(result.loss.detach())):
                self._stop_not_finite("loss", float(result.loss.detach()), [batch])
            torch.autograd.backward(result.loss)
            results.append(result)
        rate = learning_rate(self.state.step, self.total_steps, config)
        norm = self.optimizer.step(rate)
        if not math.isfinite(norm):
            self._stop_not_finite("gradient norm", norm, [batch for batch, _ in batches])
        self.state.step += 1
        self.state.epoch, self.state.batch, self.state.skipped_batches = group.epoch, group.num_done, group.num_skipped
        positions = sum(batch.num_positions for batch, _ in batches)
        self.state.positions += positions
        return {
            "loss": sum(float(result.loss.detach()) for result in results),
            "step_loss": sum(result.step_loss for result in results),
            "kept": kept,
            "supervised": sum(result.supervised for result in results),
            "hits": sum(result.hits for result in results) if wants_hits else None,
            "grad_norm": norm,
            "learning_rate": rate,
            "positions": positions,
            "seconds": time.monotonic() - begun,
        }

    def _loss(self, batch: Batch, argmax: torch.Tensor, weights: torch.Tensor, wants_hits: bool) -> LossResult:
        draft = self.draft
        states = draft.unroll(batch, self.config.num_unroll_steps)
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
        """Batches with their argmax, `accumulate` at a time (fewer at an epoch's end), from the state's position on."""
        config = self.config
        epoch, num_done, num_skipped = self.state.epoch, self.state.batch, self.state.skipped_batches
        while True:
            lists = self.corpus.epoch(epoch, config.seed, config.batch_tokens) if epoch else self.first_epoch
            batches: list[tuple[Batch, torch.Tensor]] = []
            for batch in read_ahead(self.corpus, lists[num_done:], config.num_unroll_steps):
                num_done += 1
                if batch.num_supervised:
                    batches.append((batch, self._argmax(batch, is_exact=False)))
                else:
                    num_skipped += 1
                if batches and (len(batches) == config.accumulate or num_done == len(lists)):
                    yield _Group(batches=batches, epoch=epoch, num_done=num_done, num_skipped=num_skipped)
                    batches = []
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
        batches = read_ahead(self.corpus, lists, self.num_draft_tokens)
        result = replay(self.draft, ((batch, self._argmax(batch, is_exact=True)) for batch in batches), self.rows)
        self.last_replay = result
        length = result.overall.accept_length
        is_best = state.best_step < 0 or length > state.best_accept_length
        state.stale_replays = 0 if is_best else state.stale_replays + 1
        if is_best:
            state.best_step, state.best_accept_length = state.step, length
        self._write_metrics(
            {
                "kind": "heldout",
                "step": state.step,
                "epoch": state.epoch,
                "seconds": round(state.seconds, 2),
                "accept_length": round(length, 4),
                "verifications": result.overall.verifications,
                "accepted": result.overall.accepted,
                "step_accuracy": [round(value, 4) for value in result.overall.step_accuracy],
                "per_dataset": {
                    name: {
                        "accept_length": round(counts.accept_length, 4),
                        "verifications": counts.verifications,
                        "accepted": counts.accepted,
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
        save_checkpoint(
            self.checkpoints,
            self.state,
            self.optimizer.masters,
            self.optimizer.state(),
            is_best=is_best,
            keep=self.config.keep_checkpoints,
        )

    def _resume(self, found: Checkpoint) -> None:
        self.optimizer.load(found.masters, found.optimizer)
        logger.info("resumed step=%d epoch=%d batch=%d", self.state.step, self.state.epoch, self.state.batch)

    def _write_metrics(self, row: dict[str, Any]) -> None:
        with open(self.folder / METRICS, "ab") as file:
            file.write(json_line(row))

    def _cut_metrics(self) -> None:
        """Drop metrics past the resumed step (all of them for a fresh start), a torn last line included."""
        path = self.folder / METRICS
        kept = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            try:
                if line and json.loads(line)["step"] <= self.state.step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                logger.warning("metrics line dropped file=%s", path)
        write_bytes(path, b"".join(kept) if self.state.step else b"")

    def _stop_not_finite(self, what: str, value: float, batches: list[Batch]) -> None:
        ids = [record_id for batch in batches for record_id in batch.ids]
        dump = self.folder / DUMP
        write_json(dump, {"step": self.state.step, "epoch": self.state.epoch, "what": what, "value": str(value), "ids": ids})
        raise EyasError(
            f"{what} is {value} at step {self.state.step} on records {', '.join(ids[:8])} (all {len(ids)} in {dump}); "
            "lower draft.learning_rate or inspect these records; the last checkpoint is kept"
        )


class _Window:
    """Sums over the steps between two lines of metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def add(self, step: dict[str, Any]) -> None:
        self.steps.append(step)

    def figures(self) -> dict[str, Any]:
        kept = sum(step["kept"] for step in self.steps)
        counted = [step for step in self.steps if step["hits"] is not None]
        supervised = sum(step["supervised"] for step in self.steps)
        figures = {
            "loss": round(sum(step["loss"] for step in self.steps) / len(self.steps), 5),
            "step_loss": _ratios(sum(step["step_loss"] for step in self.steps), kept),
            "grad_norm": round(sum(step["grad_norm"] for step in self.steps) / len(self.steps), 4),
            "learning_rate": self.steps[-1]["learning_rate"],
            "supervised": int(supervised[0]),
            "dropped": int(supervised[0] - kept[0]),
            "positions_per_s": round(
                sum(step["positions"] for step in self.steps) / sum(step["seconds"] for step in self.steps), 1
            ),
        }
        if counted:
            figures["step_accuracy"] = _ratios(sum(step["hits"] for step in counted), sum(step["supervised"] for step in counted))
        return figures


def _ratios(sums: torch.Tensor, counts: torch.Tensor) -> list[float]:
    return [round(float(value), 5) for value in sums / counts.clamp(min=1)]
