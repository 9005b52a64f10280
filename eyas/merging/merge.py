"""Phase 3: every dataset's responses become one training order, packed tokens and a vocabulary map.

Two passes, both out of core. First: check every record and scatter the good ones into buckets by id. Second:
per bucket sort, drop doubled ids, count generated ids, append to `tokens.parquet`, and scatter
(key, id) by the shuffle's key, from which the orders are written. Memory follows
`merging.memory_bytes`, the bytes written do not.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eyas.config import RunConfig
from eyas.errors import ConfigError, GateError, TooManyRejects
from eyas.files import fsync_folder, json_line, storage_errors
from eyas.manifest import MANIFEST_NAME, Counts, Manifest, file_entries, fingerprint, finished_manifest, now, verify_manifest
from eyas.merging.blocks import HEAD, CheckedBlock, apart, check_blocks, cut_blocks
from eyas.merging.config import MergingConfig
from eyas.merging.order import ORDER_HEAD, add_copies, in_order
from eyas.merging.parquet import ORDER_SCHEMA, TOKENS_SCHEMA, RowGroups, hex_ids, row_groups
from eyas.merging.records import RESPONSES_NAME, RecordRules
from eyas.merging.spill import Heads, Spill, Tokens
from eyas.merging.vocabulary import VocabularyMap, build_map, forced_tokens, kept_map
from eyas.progress import Progress, Report, silent
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder, exclusive

VERSION = 1
TOKENS_NAME, ORDER_NAME, HELDOUT_NAME = "tokens.parquet", "order.parquet", "heldout.parquet"
MAP_NAME, REJECTS_NAME = "vocab_map.safetensors", "rejects.jsonl"
_ROW_GROUP_TOKENS = 1 << 20
_ROW_GROUP_ENTRIES = 1 << 18

logger = logging.getLogger(__name__)


def merge(run: RunFolder, config: RunConfig, report: Report = silent) -> Manifest:
    """Write `merged/` and return its manifest; an unchanged, whole one is returned as it is.

    Raises `ArtifactError` where responses are missing, damaged or unfinished, `GateError` where a dataset has
    no usable record, `TooManyRejects` (after everything was written) above `merging.reject_limit`.
    """
    spec = load_target(config.target)
    names = dataset_names(config)
    responses = {name: _finished_responses(run, name) for name in names}
    settings = config.merging.model_dump(include={"seed", "max_tokens", "mixture", "draft_vocab_size", "max_line_bytes"})
    total_bytes = sum((run.responses(name) / RESPONSES_NAME).stat().st_size for name in names)
    forced = apart(forced_tokens, spec, config, total_bytes=total_bytes)
    kept = kept_map(run.baseline, spec) if config.draft.warm_start else None
    wanted = fingerprint(
        "merge",
        VERSION,
        inputs={name: manifest.digest() for name, manifest in responses.items()},
        config={**settings, "vocab_size": spec.vocab_size, "forced": forced} | ({"map": kept.digest()} if kept else {}),
    )
    with exclusive(run.merged / ".lock", f"the merge of {run.root}"):
        manifest = finished_manifest(run.merged, wanted)
        if manifest is None:
            manifest = _Merge(run, config.merging, spec, names, forced, report, kept).write(wanted, responses, settings)
    return _within_limit(manifest, config.merging.reject_limit, run.merged)


@dataclass
class _Tally:
    """What the second pass counts."""

    generated: npt.NDArray[np.int64]  # [V], training split
    heldout_generated: npt.NDArray[np.int64]  # [V]
    lengths: npt.NDArray[np.int64]  # [max_tokens + 1] records of that many tokens
    records: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_cut: int = 0


class _Merge:
    def __init__(
        self,
        run: RunFolder,
        config: MergingConfig,
        spec: TargetSpec,
        names: list[str],
        forced: list[int],
        report: Report,
        kept: VocabularyMap | None = None,
    ) -> None:
        self.kept = kept
        self.run, self.config, self.spec, self.names, self.forced, self.report = run, config, spec, names, forced, report
        self.work = run.merged / ".work"
        self.rejected: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def write(self, wanted: str, responses: dict[str, Manifest], settings: dict[str, Any]) -> Manifest:
        started_at = now()
        shutil.rmtree(self.work, ignore_errors=True)  # of a merge that was killed
        with storage_errors(self.run.merged):
            self.work.mkdir(parents=True)
            with open(self.work / REJECTS_NAME, "wb") as rejects:
                tally, orders = self._tokens(self._scatter(rejects), rejects)
            num_order = self._order(orders[0], ORDER_NAME)
            self._order(orders[1], HELDOUT_NAME)
            vocabulary = self.kept or build_map(tally.generated, self.forced, self.config.draft_vocab_size)
            self._warn_of_missing(vocabulary)
            vocabulary.write(self.work / MAP_NAME)
            files = [TOKENS_NAME, ORDER_NAME, HELDOUT_NAME, MAP_NAME, REJECTS_NAME]
            self._publish(files)
        done = sum(tally.records.values())
        manifest = Manifest(
            stage="merge",
            stage_version=VERSION,
            fingerprint=wanted,
            inputs={f"responses/{name}": manifest.digest() for name, manifest in responses.items()},
            config=settings,
            counts=Counts.of(done=done, rejected=self.rejected.total()),
            rejected_by_reason=dict(sorted(self.rejected.items())),
            files=file_entries(self.run.merged, files),
            figures=_figures(tally, vocabulary, num_order, self.names),
            started_at=started_at,
        ).write(self.run.merged)
        num_in = self.records.total()
        if manifest.counts.num_in != num_in:
            raise AssertionError(f"{num_in} records were read, {manifest.counts.num_in} are accounted for")
        self._progress(1.0, is_final=True)
        return manifest

    def _progress(self, share: float, *, is_final: bool = False) -> None:
        """Of the responses' bytes, each gone through twice: the second pass, which counts records, in the same unit."""
        total = sum((self.run.responses(name) / RESPONSES_NAME).stat().st_size for name in self.names)
        self.report(Progress(stage="merge", done=round(share * total), total=total, unit="bytes", is_final=is_final))

    def _scatter(self, rejects: IO[bytes]) -> Spill:
        """First pass: check every record and spill the good ones by id."""
        paths = [self.run.responses(name) / RESPONSES_NAME for name in self.names]
        total_bytes = sum(path.stat().st_size for path in paths)
        block_bytes = min(8 << 20, max(64 << 10, self.config.memory_bytes // 64))
        blocks = (
            block
            for index, (name, path) in enumerate(zip(self.names, paths, strict=True))
            for block in cut_blocks(path, index, self._rules(name), block_bytes)
        )
        # a token costs at least four bytes of JSON ("1,0,") and four in the spill, so buckets are no larger than this
        spill = self._spill("tokens", HEAD, total_bytes)
        done_bytes = 0
        for checked in check_blocks(blocks, workers=self.config.workers or os.cpu_count() or 1, total_bytes=total_bytes):
            self._account(checked, rejects)
            heads = checked.heads.copy()
            heads["line"] += self.lines[self.names[checked.block.dataset]] - checked.num_lines
            spill.add(heads["high"], heads, checked.tokens)
            done_bytes += checked.block.end - checked.block.start
            self._progress(0.5 * done_bytes / max(1, total_bytes))
        self._gate()
        return spill

    def _tokens(self, spill: Spill, rejects: IO[bytes]) -> tuple[_Tally, tuple[Spill, Spill]]:
        """Second pass: write records by ascending id, count, and spill what the orders need."""
        vocab_size = self.spec.vocab_size
        zeros = np.zeros(vocab_size, dtype=np.int64)
        tally = _Tally(zeros, zeros.copy(), np.zeros(self.config.max_tokens + 1, dtype=np.int64))
        num_passed = self.passed.total()
        weights = np.array([self.config.mixture.get(name, 1.0) for name in self.names])
        entry_bytes = 256 * num_passed * max(1, int(np.ceil(weights.max())))
        orders = self._spill("order", ORDER_HEAD, entry_bytes), self._spill("heldout", ORDER_HEAD, entry_bytes)
        done = 0
        with row_groups(self.work / TOKENS_NAME, TOKENS_SCHEMA, _ROW_GROUP_TOKENS) as groups:
            for heads, tokens in spill.read():
                done += len(heads)
                heads, lists = self._sorted_unique(heads, tokens, rejects)
                del tokens
                self._count(tally, heads, lists)
                groups.add(self._table(heads, lists), heads["num_tokens"].astype(np.int64))
                train = heads[~heads["is_heldout"]]
                add_copies(orders[0], train, weights[train["dataset"]], self.config.seed)
                heldout = heads[heads["is_heldout"]]
                add_copies(orders[1], heldout, np.ones(len(heldout)), self.config.seed)
                self._progress(0.5 + 0.5 * done / num_passed)
        return tally, orders

    def _sorted_unique(self, heads: Heads, tokens: Tokens, rejects: IO[bytes]) -> tuple[Heads, pa.ListArray]:
        """Records by ascending id; of equal ids the first in order of dataset and line stays."""
        order = np.lexsort((heads["line"], heads["dataset"], heads["low"], heads["high"]))
        ordered = heads[order]
        is_double = np.zeros(len(order), dtype=bool)
        is_double[1:] = (ordered["high"][1:] == ordered["high"][:-1]) & (ordered["low"][1:] == ordered["low"][:-1])
        doubles = ordered[is_double]
        for head, record_id in zip(doubles, hex_ids(doubles["high"], doubles["low"]).to_pylist(), strict=True):
            name = self.names[head["dataset"]]
            self._reject(rejects, name, int(head["line"]), record_id, "duplicate_id", "another record has this id")
        offsets = np.concatenate([[0], np.cumsum(heads["num_tokens"], dtype=np.int64)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)).take(pa.array(order[~is_double]))
        return ordered[~is_double], lists

    def _count(self, tally: _Tally, heads: Heads, lists: pa.ListArray) -> None:
        values = lists.values.to_numpy()
        is_generated = _mask(heads).astype(bool)
        is_heldout = np.repeat(heads["is_heldout"], heads["num_tokens"])
        size = self.spec.vocab_size
        tally.generated += np.bincount(values[is_generated & ~is_heldout], minlength=size)
        tally.heldout_generated += np.bincount(values[is_generated & is_heldout], minlength=size)
        tally.lengths += np.bincount(heads["num_tokens"], minlength=len(tally.lengths))
        tally.num_cut += int(heads["was_cut"].sum())
        for index, name in enumerate(self.names):
            for split, is_split in (("train", False), ("heldout", True)):
                chosen = heads["num_tokens"][(heads["dataset"] == index) & (heads["is_heldout"] == is_split)]
                tally.records[name, split] += len(chosen)
                tally.tokens[name, split] += int(chosen.sum())

    def _table(self, heads: Heads, lists: pa.ListArray) -> pa.Table:
        mask = pa.ListArray.from_arrays(lists.offsets, pa.array(_mask(heads)))
        datasets = pa.array(np.array(self.names, dtype=object)[heads["dataset"]], pa.string())
        splits = pa.array(np.where(heads["is_heldout"], "heldout", "train"), pa.string())
        return pa.table([hex_ids(heads["high"], heads["low"]), datasets, splits, lists, mask], schema=TOKENS_SCHEMA)

    def _order(self, spill: Spill, name: str) -> int:
        position = 0
        with row_groups(self.work / name, ORDER_SCHEMA, _ROW_GROUP_ENTRIES) as groups:
            for entries in in_order(spill):
                self._add_entries(groups, entries, position)
                position += len(entries)
        return position

    @staticmethod
    def _add_entries(groups: RowGroups, entries: Heads, position: int) -> None:
        positions = pa.array(np.arange(position, position + len(entries), dtype=np.int64))
        ids = hex_ids(entries["high"], entries["low"])
        groups.add(pa.table([positions, ids], schema=ORDER_SCHEMA), np.ones(len(entries), dtype=np.int64))

    def _spill(self, name: str, head: np.dtype[np.void], total_bytes: int) -> Spill:
        num_buckets = max(1, -(-total_bytes // max(1 << 20, self.config.memory_bytes // 16)))
        return Spill(self.work / name, head, num_buckets, self.config.memory_bytes // 8)

    def _rules(self, name: str) -> RecordRules:
        config = self.config
        return RecordRules(
            dataset=name, vocab_size=self.spec.vocab_size, max_tokens=config.max_tokens, max_line_bytes=config.max_line_bytes
        )

    def _account(self, checked: CheckedBlock, rejects: IO[bytes]) -> None:
        name = self.names[checked.block.dataset]
        for number, record_id, reason, detail in checked.rejects:
            self._reject(rejects, name, self.lines[name] + number, record_id, reason, detail)
        self.lines[name] += checked.num_lines
        self.records[name] += len(checked.heads) + len(checked.rejects)
        self.passed[name] += len(checked.heads)

    def _reject(self, rejects: IO[bytes], name: str, line: int, record_id: str | None, reason: str, detail: str) -> None:
        self.rejected[reason] += 1
        where = f"responses/{name}/{RESPONSES_NAME}:{line}"
        rejects.write(json_line({"id": record_id, "reason": reason, "where": where, "detail": detail}))

    def _warn_of_missing(self, vocabulary: VocabularyMap) -> None:
        missing = sorted(set(self.forced) - set(vocabulary.kept.tolist()))
        if missing:
            logger.warning("the kept vocabulary map lacks end, think or tool tokens ids=%s: the draft never proposes them", missing)

    def _gate(self) -> None:
        for name in self.names:
            if self.records[name] and not self.passed[name]:
                raise GateError(
                    f"dataset {name}: none of its {self.records[name]} responses can be trained on, see the reasons in "
                    f"{self.work / REJECTS_NAME}; mend its generation or take it out of prompts.datasets"
                )

    def _publish(self, files: list[str]) -> None:
        for name in files:
            with open(self.work / name, "rb+") as file:
                os.fsync(file.fileno())
        (self.run.merged / MANIFEST_NAME).unlink(missing_ok=True)  # from here on the old files are no longer whole
        for name in files:
            os.replace(self.work / name, self.run.merged / name)
        fsync_folder(self.run.merged)
        shutil.rmtree(self.work)


def _mask(heads: Heads) -> npt.NDArray[np.int8]:
    """The loss mask of records end to end: 0 on the prompt, 1 on the rest."""
    runs = np.stack([heads["prompt_tokens"], heads["num_tokens"] - heads["prompt_tokens"]], axis=1).reshape(-1)
    return np.repeat(np.tile(np.array([0, 1], dtype=np.int8), len(heads)), runs)


def dataset_names(config: RunConfig) -> list[str]:
    """Names of the datasets to merge; raises `ConfigError` where there is none or `merging.mixture` names another."""
    names = [dataset.name for dataset in config.prompts.datasets]
    if not names:
        raise ConfigError("prompts.datasets is empty: there is nothing to merge; name at least one dataset")
    unknown = sorted(set(config.merging.mixture) - set(names))
    if unknown:
        raise ConfigError(f"merging.mixture names {', '.join(unknown)}, which prompts.datasets does not; known: {', '.join(names)}")
    return names


def _finished_responses(run: RunFolder, name: str) -> Manifest:
    manifest = verify_manifest(run.responses(name))
    if not manifest.is_complete:
        raise GateError(
            f"responses of {name} are unfinished: {manifest.counts.pending} of {manifest.counts.num_in} pending; "
            "run the generation again, it continues"
        )
    return manifest


def _within_limit(manifest: Manifest, limit: float, folder: Path) -> Manifest:
    counts = manifest.counts
    if counts.rejected > limit * counts.num_in:
        raise TooManyRejects(
            f"merge: {counts.rejected} of {counts.num_in} records were rejected ({manifest.rejected_by_reason}), at most "
            f"{limit:.1%} are allowed (merging.reject_limit); see {folder / REJECTS_NAME}"
        )
    return manifest


def _figures(tally: _Tally, vocabulary: VocabularyMap, num_order: int, names: list[str]) -> dict[str, Any]:
    share = np.cumsum(tally.lengths) / max(1, tally.lengths.sum())
    return {
        "records": {split: sum(tally.records[name, split] for name in names) for split in ("train", "heldout")},
        "tokens": {split: sum(tally.tokens[name, split] for name in names) for split in ("train", "heldout")},
        "generated_tokens": {"train": int(tally.generated.sum()), "heldout": int(tally.heldout_generated.sum())},
        "per_dataset": {
            name: {
                split: {"records": tally.records[name, split], "tokens": tally.tokens[name, split]}
                for split in ("train", "heldout")
            }
            for name in names
        },
        "order_entries": num_order,
        "cut_by_max_tokens": tally.num_cut,
        "length_quantiles": {f"p{q}": int(np.searchsorted(share, q / 100)) for q in (5, 25, 50, 75, 95, 99, 100)},
        "draft_vocab_size": len(vocabulary.kept),
        "vocabulary_filled": vocabulary.num_filled,
        "coverage": {
            "train": vocabulary.coverage(tally.generated),
            "heldout": vocabulary.coverage(tally.heldout_generated),
        },
    }
