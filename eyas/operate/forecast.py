"""Hours and disk of each phase, before and while it runs; every number says what it rests on.

Disk follows from counts: the hidden-state store's bytes a token are its codec's, the others are
measured sizes per token. Hours follow from rates measured in this run where a phase has run, otherwise
from stated assumptions about this machine's processors, good to a factor of two; for servers that were
never measured there is no number. `eyas probe-server` measures them.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel

from eyas.config import RunConfig
from eyas.hidden.codec import bytes_per_token
from eyas.operate.phases import PHASES, Phase
from eyas.operate.status import PhaseStatus
from eyas.operate.volumes import Volumes
from eyas.target.spec import TargetSpec

JSON_BYTES_PER_TOKEN = 8.0
"""One id and one mask digit in tokenized_data.jsonl, measured on SmolLM2's ids."""
JOURNAL_BYTES_PER_TOKEN = 7.0
PARQUET_BYTES_PER_TOKEN = 3.0
RECORD_BYTES = 600
"""Ids, provenance and spans of one record in journal and tokenized data together."""

CORE_FLOPS = 60e9
"""Assumed useful FLOP/s of one core in large matrix products (prefill, training), fp32; bf16 cores do more."""
CORE_DECODE_FLOPS = 30e9
"""Assumed for decoding in batches."""
CORE_SINGLE_FLOPS = 2e9
"""Assumed for decoding one request, where the memory's bandwidth decides."""


class TargetSizes(BaseModel):
    """The target's sizes that forecasts need, kept in run.json so that they can be made from the folder alone."""

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @property
    def num_parameters(self) -> int:
        """Parameters of a dense decoder of these sizes (a mixture of experts has more)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size) + self.vocab_size * self.hidden_size

    def draft_parameters(self, config: RunConfig) -> int:
        """Parameters that training updates: fc, one layer whose attention reads 2H, and the head of D rows."""
        width = config.draft.intermediate_size or self.intermediate_size
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 4 * self.num_kv_heads + self.num_heads)
        head = min(config.merging.draft_vocab_size, self.vocab_size) * self.hidden_size
        return 3 * self.hidden_size**2 + attention + 3 * self.hidden_size * width + head


class PhaseForecast(BaseModel):
    """What is left to do in one phase; `hours` is None where nobody can know yet.

    Without `is_known` the numbers are lower bounds: a dataset's number of prompts is not known before phase 1.
    """

    phase: Phase
    is_known: bool = True
    records: int
    tokens: int
    disk_bytes: int
    disk_bytes_at_most: int
    hours: float | None = None
    basis: str = ""


class Forecast(BaseModel):
    """All phases, and the disk that what is left of them needs; lower bounds without `is_known`."""

    phases: list[PhaseForecast]
    is_known: bool = True
    hours: float | None
    disk_bytes_to_write: int
    disk_bytes_at_most: int
    volumes_basis: str


def sizes_of(spec: TargetSpec) -> TargetSizes:
    """The sizes of a target that forecasts need."""
    return TargetSizes(**{name: getattr(spec, name) for name in TargetSizes.model_fields})


def forecast(config: RunConfig, sizes: TargetSizes, counted: Volumes, statuses: dict[Phase, PhaseStatus] | None = None) -> Forecast:
    """What is left of each phase, or of a run that has not begun (no `statuses`); a pure function."""
    phases = [whole_phase(phase, config, sizes, counted) for phase in PHASES]
    if statuses:
        phases = [_rest(item, statuses[item.phase]) for item in phases]
    hours = [item.hours for item in phases]
    return Forecast(
        phases=phases,
        is_known=all(item.is_known for item in phases),
        hours=None if None in hours else sum(value for value in hours if value is not None),
        disk_bytes_to_write=sum(item.disk_bytes for item in phases),
        disk_bytes_at_most=sum(item.disk_bytes_at_most for item in phases),
        volumes_basis=counted.basis,
    )


def whole_phase(phase: Phase, config: RunConfig, sizes: TargetSizes, counted: Volumes) -> PhaseForecast:
    """One phase from its beginning."""
    records, tokens = counted.num_prompts, counted.merged_tokens
    most = counted.prompt_tokens + counted.cap_tokens
    cores = os.cpu_count() or 1
    disk = at_most = 0.0
    hours: float | None = None
    basis = f"assumed, {cores} cores"
    if phase == "prepare":
        tokens = counted.prompt_tokens
        disk = at_most = tokens * (PARQUET_BYTES_PER_TOKEN + 5.0)  # ids, and the text they were made of
        hours = records / 200 / 3600
    elif phase == "generate":
        tokens = counted.response_tokens
        disk, at_most = (
            amount * (JOURNAL_BYTES_PER_TOKEN + JSON_BYTES_PER_TOKEN)
            + counted.prompt_tokens * JSON_BYTES_PER_TOKEN
            + records * RECORD_BYTES
            for amount in (tokens, counted.cap_tokens)
        )
        work = 2 * sizes.num_parameters * (tokens / CORE_DECODE_FLOPS + counted.prompt_tokens / CORE_FLOPS)
        hours = work / cores / 3600
        if config.server.kind == "sglang":
            hours, basis = None, "unknown before the first replies; eyas probe-server measures the servers"
    elif phase == "merge":
        disk, at_most = tokens * PARQUET_BYTES_PER_TOKEN + records * 80, most * PARQUET_BYTES_PER_TOKEN + records * 80
        hours = tokens / 2e6 / 3600
    elif phase == "extract":
        per_token = bytes_per_token(sizes.hidden_size, config.hidden.codec)
        disk, at_most = tokens * per_token, min(most, records * config.merging.max_tokens) * per_token
        if config.hidden.disk_budget:  # training extracts the rest as it goes
            tokens = round(tokens * (1 - counted.train_share))
            disk, at_most = (min(amount, config.hidden.disk_budget) for amount in (disk, at_most))
        hours = 2 * sizes.num_parameters * tokens / CORE_FLOPS / cores / 3600
        if config.hidden.source != "transformers":
            hours, basis = None, "unknown before the first shard"
    elif phase == "train":
        parameters = sizes.draft_parameters(config)
        disk = at_most = parameters * 12 * (config.draft.keep_checkpoints + 1) + parameters * 4
        trained = tokens * counted.train_share * config.draft.epochs
        if config.draft.max_steps:
            trained = min(trained, config.draft.max_steps * config.draft.batch_tokens * config.draft.accumulate)
        tokens = round(trained)
        hours = 1.2 * 6 * parameters * config.draft.num_unroll_steps * trained / CORE_FLOPS / cores / 3600
        if config.hidden.disk_budget:
            hours += 2 * sizes.num_parameters * trained / CORE_FLOPS / cores / 3600
            basis += ", extraction in every epoch included"
            if config.hidden.source != "transformers":
                hours, basis = None, "unknown before the first shard"
    else:
        records = config.benchmark.prompts_per_set * len(config.benchmark.sets)
        tokens = records * config.benchmark.max_new_tokens
        disk = at_most = records * RECORD_BYTES + tokens * 4 * JSON_BYTES_PER_TOKEN
        timed = [
            min(max(config.benchmark.timed_prompts, 2 * c), config.benchmark.prompts_per_set) for c in config.benchmark.concurrency
        ]
        alone = 4 * config.benchmark.repeats * sum(timed) * len(config.benchmark.sets) * config.benchmark.max_new_tokens
        work = 2 * sizes.num_parameters * (2 * tokens / CORE_DECODE_FLOPS + alone / CORE_SINGLE_FLOPS)
        hours = work / cores / 3600
        if config.server.kind == "sglang":
            hours, basis = None, "unknown before the first replies"
    is_known = counted.is_known or phase == "bench"  # which has prompts of its own
    if not is_known:
        hours, basis = None, "unknown before phase 1: a dataset has no quota"
    return PhaseForecast(
        phase=phase,
        is_known=is_known,
        records=records,
        tokens=tokens,
        disk_bytes=round(disk),
        disk_bytes_at_most=round(max(disk, at_most)),
        hours=hours,
        basis=basis,
    )


def _rest(item: PhaseForecast, status: PhaseStatus) -> PhaseForecast:
    """What is left of a phase that has begun: nothing once done, otherwise by its own share and rate."""
    if status.state == "done":
        update: dict[str, Any] = {"is_known": True, "disk_bytes": 0, "disk_bytes_at_most": 0, "hours": 0.0, "basis": "done"}
        return item.model_copy(update=update)
    total, pending = status.counts.get("in", 0), status.counts.get("pending", 0)
    share = pending / total if total else 1.0
    update = {
        "disk_bytes": round(item.disk_bytes * share),
        "disk_bytes_at_most": round(item.disk_bytes_at_most * share),
        "hours": None if item.hours is None else item.hours * share,
    }
    if (measured := _measured_hours(status)) is not None:
        update |= {"hours": measured, "basis": "measured in this run"}
    return item.model_copy(update=update)


def _measured_hours(status: PhaseStatus) -> float | None:
    """Hours left by what the pieces in progress say or have done; None before there is a rate."""
    if status.state != "running" or not status.progress:
        return None
    left = [piece.remaining_s for piece in status.progress]
    known = [seconds for seconds in left if seconds is not None]
    return max(known) / 3600 if len(known) == len(left) else None
