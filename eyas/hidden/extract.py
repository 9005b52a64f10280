"""Phase 4: hidden states of every response, shard by shard, each whole or absent.

A shard is planned from the responses alone and keyed by the content addresses of its records, so any number
of processes may work on one store: each takes a shard under its lock, a dead one's shard is taken up again,
and the bytes are the same. May run per dataset, before the merge.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from eyas.config import RunConfig
from eyas.errors import ArtifactError, TooManyRejects
from eyas.files import atomic_file, json_line
from eyas.hidden.codec import CODECS, CodecName
from eyas.hidden.disk import Window, check_disk, store_bytes, window_of
from eyas.hidden.kind import KIND_NAME, STATES_VERSION, StoreKind, resolve_kind, started_at
from eyas.hidden.locks import held
from eyas.hidden.plan import Line, ShardPlan, finished_entry, plan_shards, planned, planned_lines, record_rules
from eyas.hidden.probe import states_fault
from eyas.hidden.proving import PROBE_NAME, ensure_proven
from eyas.hidden.sources.opening import open_source
from eyas.hidden.sources.protocol import Source
from eyas.hidden.store.codecs import encode_states
from eyas.hidden.store.reader import INDEX_NAME, REJECTS_NAME, verify_store
from eyas.hidden.store.shard import Quarantined, ShardEntry, load_entry, shard_tensors, write_entry, write_shard
from eyas.hidden.store.top import TopTargets, open_top_targets
from eyas.manifest import MANIFEST_NAME, Counts, FileEntry, Manifest, file_entries, fingerprint, load_manifest
from eyas.merging.records import RESPONSES_NAME
from eyas.progress import Progress, Report, silent
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

VERSION = 1

logger = logging.getLogger(__name__)

__all__ = ["ShardPlan", "extract", "extract_shard", "finish_extraction", "plan_shards"]


def extract(run: RunFolder, config: RunConfig, report: Report = silent) -> Manifest:
    """Extract every dataset that still lacks states and return the store's manifest.

    Raises `ConfigError` if the disk is too small, `GateError` if the probe fails, `TooManyRejects` at the end.
    """
    spec = load_target(config.target)
    kind = resolve_kind(run, config.hidden, spec)
    standing = _standing(run, config, kind)
    if standing is not None:
        return _within_limit(standing, config)
    plans = [plan for dataset in config.prompts.datasets for plan in plan_shards(run, config, dataset.name)]
    missing = [plan for plan in plans if finished_entry(run, plan, kind) is None]
    window = _window(run, config, spec, kind)
    num_records, num_tokens = sum(plan.num_records for plan in missing), sum(plan.num_tokens for plan in missing)
    need_bytes = store_bytes(num_records, num_tokens, spec.hidden_size, kind.codec) + window.room_bytes
    check_disk(run.hidden, need_bytes, config.hidden.disk_reserve_bytes)
    meter = _Meter(report, missing, plans)
    later = [plan for plan in missing if not _try_shard(run, config, spec, kind, plan, meter, waits=False)]
    for plan in later:  # another process has them in hand, or died over them
        _try_shard(run, config, spec, kind, plan, meter, waits=True)
    return finish_extraction(run, config)


def extract_shard(run: RunFolder, config: RunConfig, plan: ShardPlan, report: Report = silent) -> ShardEntry:
    """Extract one planned shard, or return it if it is whole; waits while another process has it in hand."""
    spec = load_target(config.target)
    kind = resolve_kind(run, config.hidden, spec)
    _try_shard(run, config, spec, kind, plan, _Meter(report, [plan], [plan]), waits=True)
    entry = finished_entry(run, plan, kind)
    if entry is None:
        raise ArtifactError(
            f"{run.hidden / plan.name} is not whole although it was just written; is another run using this folder?"
        )
    return entry


def finish_extraction(run: RunFolder, config: RunConfig) -> Manifest:
    """Index all shards, account for every record and write the manifest; raises `ArtifactError` if a shard is missing."""
    spec = load_target(config.target)
    kind = resolve_kind(run, config.hidden, spec)
    with held(run.hidden / ".finish.lock"):
        standing = _standing(run, config, kind)
        if standing is not None:
            return _within_limit(standing, config)
        entries = []
        for dataset in config.prompts.datasets:
            for plan in plan_shards(run, config, dataset.name):
                entry = finished_entry(run, plan, kind)
                if entry is None:
                    raise ArtifactError(f"{run.hidden / plan.name}.safetensors is missing or not whole; run the extraction again")
                entries.append(entry)
        window = _window(run, config, spec, kind)
        rejects = _write_index(run, entries)
        strays = _clear(run, {entry.name for entry in entries} | set(window.shards))
        manifest = _manifest(run, config, kind, entries, rejects, strays, window).write(run.hidden)
    return _within_limit(manifest, config)


class _Meter:
    """Turns tokens done in any shard into progress of their dataset."""

    def __init__(self, report: Report, missing: list[ShardPlan], plans: list[ShardPlan]) -> None:
        self._report = report
        self._total: Counter[str] = Counter()
        for plan in plans:
            self._total[plan.dataset] += plan.num_tokens
        self._done = self._total.copy()
        for plan in missing:
            self._done[plan.dataset] -= plan.num_tokens

    def add(self, dataset: str, num_tokens: int) -> None:
        self._done[dataset] += num_tokens
        done, total = self._done[dataset], self._total[dataset]
        self._report(Progress(stage="extract", name=dataset, done=done, total=total, unit="tokens", is_final=done >= total))


def _try_shard(
    run: RunFolder, config: RunConfig, spec: TargetSpec, kind: StoreKind, plan: ShardPlan, meter: _Meter, *, waits: bool
) -> bool:
    """Extract a shard under its lock unless it is whole; False if another process holds it and we do not wait."""
    with held(run.hidden / ".locks" / plan.name, waits=waits) as is_mine:
        if not is_mine:
            return False
        if finished_entry(run, plan, kind) is None:
            source = open_source(config, spec, kind)
            ensure_proven(run, config, spec, kind, source)
            for dead in run.hidden.glob(f".{plan.name}.safetensors.*.tmp"):  # its writer was killed: the lock is ours now
                dead.unlink(missing_ok=True)
            need_bytes = store_bytes(plan.num_records, plan.num_tokens, spec.hidden_size, kind.codec)
            check_disk(run.hidden, need_bytes, config.hidden.disk_reserve_bytes)
            _write_plan(run, config, spec, kind, plan, source, lambda count: meter.add(plan.dataset, count))
        else:
            meter.add(plan.dataset, plan.num_tokens)
    return True


def _write_plan(
    run: RunFolder,
    config: RunConfig,
    spec: TargetSpec,
    kind: StoreKind,
    plan: ShardPlan,
    source: Source,
    on_tokens: Callable[[int], None],
) -> None:
    lines = list(planned_lines(run, record_rules(config, spec, plan.dataset), plan))
    quarantined = [line.reject for line in lines if line.reject is not None]
    shard = _Filling([line for line in lines if line.record is not None], spec.hidden_size)
    for index, states in source.extract(shard.sequences):
        fault = states_fault(states, len(shard.sequences[index]), spec.hidden_size)
        if fault is None:
            shard.put(index, states.aux, states.final)
        else:
            line = shard.lines[index]
            logger.warning("record=%s quarantined: %s", shard.record_id(index), fault)
            where = f"responses/{plan.dataset}/{RESPONSES_NAME}:{line.number}"
            quarantined.append(Quarantined(id=shard.record_id(index), reason="bad_states", where=where, detail=fault))
        on_tokens(len(shard.sequences[index]))
    kept = [index for index in range(len(shard.lines)) if index in shard.filled]
    if not plan.is_windowed:
        (run.hidden / MANIFEST_NAME).unlink(missing_ok=True)  # from here on the old index is no longer right
    top_targets = open_top_targets(run, spec, kind) if CODECS[kind.codec].final is None else None
    size_bytes, sha256 = write_shard(run.hidden / f"{plan.name}.safetensors", shard.tensors(kept, kind.codec, top_targets))
    entry = ShardEntry(
        name=plan.name,
        dataset=plan.dataset,
        number=plan.number,
        kind=kind.digest(),
        plan=plan.digest,
        ids=[shard.record_id(index) for index in kept],
        addresses=[kind.address(shard.sequences[index]) for index in kept],
        num_tokens=[len(shard.sequences[index]) for index in kept],
        quarantined=sorted(quarantined, key=lambda item: int(item.where.rpartition(":")[2])),
        size_bytes=size_bytes,
        sha256=sha256,
    )
    _warn_if_changed(run, entry)
    write_entry(run.hidden, entry)


def _warn_if_changed(run: RunFolder, entry: ShardEntry) -> None:
    """A shard that is extracted again should be the bytes that it was: training reads it as if it had never gone."""
    try:
        before = load_entry(run.hidden / entry.sidecar_name)
    except ArtifactError:
        return
    if (before.kind, before.plan) == (entry.kind, entry.plan) and before.sha256 != entry.sha256:
        logger.warning("shard=%s came out differently than before: its source does not repeat itself exactly", entry.name)


class _Filling:
    """A shard in memory, filled in any order."""

    def __init__(self, lines: list[Line], hidden_size: int) -> None:
        self.lines = lines
        self._records = [line.record for line in lines if line.record is not None]
        self.sequences = [record.tokens for record in self._records]
        lengths = [len(sequence) for sequence in self.sequences]
        self._ends = np.cumsum(lengths, dtype=np.int64).tolist()
        self._states = {
            "aux": torch.empty(sum(lengths), 3 * hidden_size, dtype=torch.bfloat16),
            "final": torch.empty(sum(lengths), hidden_size, dtype=torch.bfloat16),
        }
        self.filled: set[int] = set()

    def record_id(self, index: int) -> str:
        return self._records[index].id

    def put(self, index: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        rows = self._rows(index)
        self._states["aux"][rows] = aux
        self._states["final"][rows] = final
        self.filled.add(index)

    def tensors(self, kept: list[int], codec: CodecName, top_targets: TopTargets | None) -> dict[str, torch.Tensor]:
        """The shard's tensors, coded, without the records that were quarantined."""
        states = self._states
        if len(kept) < len(self.lines):
            rows = torch.cat(
                [torch.arange(self._rows(i).start, self._rows(i).stop) for i in kept] or [torch.zeros(0, dtype=torch.int64)]
            )
            states = {name: tensor[rows] for name, tensor in states.items()}
        empty = np.zeros(0)
        tokens = np.concatenate([empty.astype(np.int32), *(self.sequences[i] for i in kept)])
        mask = np.concatenate([empty.astype(np.uint8), *(self._records[i].loss_mask for i in kept)])
        coded = encode_states(states["aux"], states["final"], torch.from_numpy(mask), codec, top_targets)
        return shard_tensors(torch.from_numpy(tokens), torch.from_numpy(mask), [len(self.sequences[i]) for i in kept], coded)

    def _rows(self, index: int) -> slice:
        return slice(self._ends[index] - len(self.sequences[index]), self._ends[index])


def _fingerprint(run: RunFolder, config: RunConfig, kind: StoreKind) -> tuple[str, dict[str, str], dict[str, Any]]:
    inputs = {f"responses/{item.name}": load_manifest(run.responses(item.name)).digest() for item in config.prompts.datasets}
    settings = {
        "kind": kind.settings(),
        "max_tokens": config.merging.max_tokens,
        "max_line_bytes": config.merging.max_line_bytes,
        "shard_bytes": config.hidden.shard_bytes,
        "batch_tokens": config.hidden.batch_tokens,
        **({"disk_budget": config.hidden.disk_budget} if config.hidden.disk_budget else {}),
    }
    return fingerprint("extract", VERSION * 1000 + STATES_VERSION, inputs=inputs, config=settings), inputs, settings


def _window(run: RunFolder, config: RunConfig, spec: TargetSpec, kind: StoreKind) -> Window:
    """What `hidden.disk_budget` leaves to training, empty without one; raises `ConfigError` if it is too small."""
    datasets = config.prompts.datasets if config.hidden.disk_budget else []
    plans = [plan for dataset in datasets for plan, _ in planned(run, config, dataset.name)]
    return window_of(plans, config.hidden.disk_budget, spec.hidden_size, kind.codec)


def _standing(run: RunFolder, config: RunConfig, kind: StoreKind) -> Manifest | None:
    """The manifest of a store that is finished, whole (see `verify_store`) and made from these inputs."""
    try:
        manifest = verify_store(run.hidden)
        return manifest if manifest.is_complete and manifest.fingerprint == _fingerprint(run, config, kind)[0] else None
    except ArtifactError:
        return None


def _write_index(run: RunFolder, entries: list[ShardEntry]) -> list[Quarantined]:
    """Write index and rejects; returns the rejects. Of doubled ids the first in order of shards stays."""
    rows: dict[str, tuple[str, int, int, str]] = {}
    rejects: list[Quarantined] = []
    for entry in entries:
        rejects += entry.quarantined
        for row, (record_id, length, address) in enumerate(zip(entry.ids, entry.num_tokens, entry.addresses, strict=True)):
            if record_id in rows:
                where = f"{entry.file_name}:{row}"
                rejects.append(Quarantined(id=record_id, reason="duplicate_id", where=where, detail="another record has this id"))
            else:
                rows[record_id] = (entry.name, row, length, address)
    ids = sorted(rows)
    columns = list(zip(*(rows[record_id] for record_id in ids), strict=True)) or [(), (), (), ()]
    table = pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "shard": pa.array(columns[0], pa.string()),
            "row": pa.array(columns[1], pa.int32()),
            "num_tokens": pa.array(columns[2], pa.int32()),
            "address": pa.array(columns[3], pa.string()),
        }
    )
    with atomic_file(run.hidden / INDEX_NAME) as file:
        pq.write_table(table, file)
    with atomic_file(run.hidden / REJECTS_NAME) as file:
        file.writelines(json_line(reject.model_dump()) for reject in rejects)
    return rejects


def _clear(run: RunFolder, ours: set[str]) -> list[str]:
    """Remove what killed or outdated extractions left; returns the names of shard files that are none of ours."""
    with held(run.hidden / ".kind.lock"), held(run.hidden / ".probe.lock"):  # whoever writes one of these now has its lock
        for name in ("shard-*", KIND_NAME, PROBE_NAME, INDEX_NAME, REJECTS_NAME, MANIFEST_NAME):
            for temporary in run.hidden.glob(f".{name}.*.tmp"):
                temporary.unlink(missing_ok=True)
    strays = []
    for path in sorted(run.hidden.glob("shard-*.safetensors")):
        if path.stem in ours:
            continue
        try:
            load_entry(path.with_suffix(".json"))
        except ArtifactError:
            logger.warning("stray file %s has no sidecar: it is not used; remove it if it is not wanted", path)
            strays.append(path.name)
            continue
        logger.info("removing %s: its records are stored elsewhere or no longer wanted", path)
        path.with_suffix(".json").unlink()
        path.unlink()
    return strays


def _manifest(
    run: RunFolder,
    config: RunConfig,
    kind: StoreKind,
    entries: list[ShardEntry],
    rejects: list[Quarantined],
    strays: list[str],
    window: Window,
) -> Manifest:
    wanted, inputs, settings = _fingerprint(run, config, kind)
    num_duplicates = sum(reject.reason == "duplicate_id" for reject in rejects)
    files = [FileEntry(path=entry.file_name, size_bytes=entry.size_bytes, sha256=entry.sha256) for entry in entries]
    num_tokens = sum(sum(entry.num_tokens) for entry in entries)
    return Manifest(
        stage="extract",
        stage_version=VERSION,
        fingerprint=wanted,
        inputs=inputs,
        config=settings,
        started_at=started_at(run),
        counts=Counts.of(done=sum(len(entry.ids) for entry in entries) - num_duplicates, rejected=len(rejects)),
        rejected_by_reason=dict(sorted(Counter(reject.reason for reject in rejects).items())),
        files=[*files, *file_entries(run.hidden, [*(entry.sidecar_name for entry in entries), INDEX_NAME, REJECTS_NAME])],
        figures={
            "tokens": num_tokens,
            "bytes": sum(entry.size_bytes for entry in entries),
            "shards": len(entries),
            "strays": strays,
            **window.figures(),
        },
    )


def _within_limit(manifest: Manifest, config: RunConfig) -> Manifest:
    counts, limit = manifest.counts, config.hidden.reject_limit
    if counts.rejected > limit * counts.num_in:
        raise TooManyRejects(
            f"extract: {counts.rejected} of {counts.num_in} records have no states ({manifest.rejected_by_reason}), at most "
            f"{limit:.1%} are allowed (hidden.reject_limit); see hidden/{REJECTS_NAME}"
        )
    return manifest
