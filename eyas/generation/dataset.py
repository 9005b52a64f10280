"""One dataset's part of a session: what is done, what is pending, its journal, gates and final files.

On disk: `journal-<key>.jsonl`, where the key is a digest of all that shapes a reply but the prompt (target,
tokenizer, sampling, seed, caps). A record id is content (docs/formats.md), so id and key together say that a
journaled reply answers this very prompt: more prompts in the same dataset continue the journal, anything else
starts another file.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config import RunConfig
from eyas.errors import ArtifactError, ConfigError, StorageError, TooManyRejects
from eyas.files import atomic_file, digest_json, json_line
from eyas.generation.canary import Canary
from eyas.generation.forecast import LengthSample
from eyas.generation.gates import Gates
from eyas.generation.journal import Journal, parse_line, read_journal
from eyas.generation.records import DONE, PENDING, PROMPTS_NAME, REJECTED, Prompt, PromptTable, journal_line, tokenized_line
from eyas.generation.scheduler import Share
from eyas.generation.statistics import LengthStatistics
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest, now, verify_manifest
from eyas.sglang.replies import Decode
from eyas.target.spec import TargetSpec
from eyas.workspace import RunFolder

log = logging.getLogger(__name__)

STAGE = "generate"
VERSION = 2
TOKENIZED_NAME = "tokenized_data.jsonl"
REJECTS_NAME = "rejects.jsonl"


class DatasetRun:
    """A dataset that takes part in a session. Open it with `open`, close it with `close`."""

    def __init__(self, run: RunFolder, config: RunConfig, spec: TargetSpec, sampling: dict[str, Any], name: str, decode: Decode):
        self.name = name
        self.folder = run.responses(name)
        self._config = config
        prompts_manifest = verify_manifest(run.prompts(name))
        if not prompts_manifest.is_complete:
            raise ArtifactError(
                f"{run.prompts(name)} has {prompts_manifest.counts.pending} pending rows; run phase 'prepare' again"
            )
        limits = {dataset.name: dataset.max_new_tokens for dataset in config.prompts.datasets}
        self.reply_config = {
            "sampling": sampling,
            "seed": config.generation.seed,
            "max_new_tokens": [limits.get(name, 0), config.generation.max_new_tokens, config.generation.min_new_tokens_room],
            "context_length": spec.context_length,
            "reasoning": config.target.reasoning,
            "always_reasons": config.target.must_reason,
            "target": spec.fingerprint,
            "tokenizer": spec.tokenizer_fingerprint,
        }
        self.inputs = {"prompts": prompts_manifest.digest()}
        self.fingerprint = fingerprint(STAGE, VERSION, inputs=self.inputs, config=self.reply_config)
        key = digest_json({"version": VERSION, **self.reply_config})[:12]
        self.journal_path = self.folder / f"journal-{key}.jsonl"
        self.prompts_path = run.prompts(name) / PROMPTS_NAME
        self._decode = decode
        self.started_at = now()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.drained = asyncio.Event()
        self.drained.set()
        self._stack = AsyncExitStack()
        self.num_rejected_by_reason: Counter[str] = Counter()
        self.num_bad_lines = 0
        self.num_retries = 0
        self.lengths = LengthStatistics()
        self.gates = Gates(name, config.generation.gates)
        caps = [cap for cap in (limits.get(name, 0), config.generation.max_new_tokens) if cap]
        self.cap = min([*caps, spec.context_length])
        self.sample = LengthSample(self.cap)
        self.flying: dict[str, tuple[float, int]] = {}
        """Requests in flight: record id → (time.monotonic() of sending, start number)."""

    def finished_manifest(self) -> Manifest | None:
        """The manifest of an earlier session if nothing need be done."""
        return finished_manifest(self.folder, self.fingerprint)

    async def open(self, on_pause: Callable[[StorageError | None], None], *, retry_s: float, give_up_s: float) -> None:
        """Take the journal's lock, read what is done, and stand ready to hand out prompts."""
        self.journal = Journal(self.journal_path, retry_s=retry_s, give_up_s=give_up_s, on_pause=on_pause)
        await self._stack.enter_async_context(self.journal)
        try:
            self.table = PromptTable(self.prompts_path)
            self._replay()
        except BaseException:
            await self.close()
            raise
        num_pending = self.table.count(PENDING)
        self._source: Iterator[Prompt] = self.table.pending()
        self.num_unsettled = num_pending
        self.share = Share(name=self.name, num_pending=num_pending, mean_tokens=self.lengths.mean or float(self.cap))
        self.share.num_started = self._num_replayed = len(self.table) - num_pending
        has_passed = self.table.count(DONE) >= self._config.generation.canary
        self.canary = Canary(
            dataset=self.name,
            wanted=0 if has_passed else min(self._config.generation.canary, num_pending),
            decode=self._decode,
        )
        self.is_canary_judged = self.canary.wanted == 0
        self._maybe_finish()

    async def close(self) -> None:
        """Flush the journal and give its lock back."""
        await self._stack.aclose()

    @property
    def may_start(self) -> bool:
        """True if a prompt may go out now: not while the canary is being waited for."""
        if self.finished.done() or self.share.num_pending <= 0:
            return False
        return self.is_canary_judged or self.share.num_started - self._num_replayed < self.canary.wanted

    def next_prompt(self) -> Prompt | None:
        """The next pending prompt, or None when all have been handed out."""
        prompt = next(self._source, None)
        if prompt is None:
            self.share.num_pending = 0
        else:
            self.share.start()
            self.drained.clear()
        return prompt

    async def write(self, prompt: Prompt, entry: dict[str, Any]) -> None:
        """Journal one outcome; it counts once it is on disk."""
        await self.journal.append(journal_line(entry))
        self.num_unsettled -= 1
        if "reject" in entry:
            self.table.states[prompt.index] = REJECTED
            self.num_rejected_by_reason[entry["reject"]] += 1
            return
        self.table.states[prompt.index] = DONE
        self.lengths.add_entry(entry)
        _, number = self.flying.get(prompt.id, (0.0, self.share.num_started))
        self.sample.add(len(entry["output_ids"]), number)
        self.share.learn(self.lengths.count, self.lengths.mean)

    def leave(self, prompt: Prompt) -> None:
        """One prompt has its outcome; the dataset ends with the last."""
        self.flying.pop(prompt.id, None)
        self.share.in_flight -= 1
        if self.share.in_flight == 0:
            self.drained.set()
        self._maybe_finish()

    def fail(self, error: BaseException) -> None:
        """End this dataset with `error`; what is journaled stays."""
        if not self.finished.done():
            self.finished.set_exception(error)

    def counts(self) -> Counts:
        done, rejected = self.table.count(DONE), self.table.count(REJECTED)
        return Counts.of(done=done, rejected=rejected, pending=len(self.table) - done - rejected)

    def write_results(self) -> Manifest:
        """Write `tokenized_data.jsonl`, `rejects.jsonl` and the manifest from prompts and journal. Blocking; run in a thread."""
        offsets, num_doubled = self._index()
        summary = LengthStatistics()
        rejected: Counter[str] = Counter()
        num_done = num_pending = 0
        tokenized, rejects = self.folder / TOKENIZED_NAME, self.folder / REJECTS_NAME
        with open(self.journal_path, "rb") as journal, atomic_file(tokenized) as output, atomic_file(rejects) as refused:
            for prompt in self.table.rows():
                if offsets[prompt.index] < 0:
                    num_pending += 1
                    continue
                entry = self._entry(journal, int(offsets[prompt.index]), prompt)
                if "reject" in entry:
                    rejected[entry["reject"]] += 1
                    where = f"{PROMPTS_NAME}:{prompt.index}"
                    refused.write(
                        json_line({"id": prompt.id, "reason": entry["reject"], "where": where, "detail": entry["detail"]})
                    )
                    continue
                num_done += 1
                summary.add_entry(entry)
                output.write(tokenized_line(self.name, prompt, entry))
        manifest = Manifest(
            stage=STAGE,
            stage_version=VERSION,
            name=self.name,
            fingerprint=self.fingerprint,
            inputs=self.inputs,
            config=self.reply_config,
            counts=Counts.of(done=num_done, rejected=rejected.total(), pending=num_pending),
            rejected_by_reason=dict(sorted(rejected.items())),
            files=file_entries(self.folder, [TOKENIZED_NAME, REJECTS_NAME]),
            figures={
                **summary.figures(),
                "journal": self.journal_path.name,
                "doubled_journal_lines": num_doubled,
                "bad_journal_lines": self.num_bad_lines,
            },
            started_at=self.started_at,
        )
        return manifest.write(self.folder)

    def _entry(self, journal: Any, offset: int, prompt: Prompt) -> dict[str, Any]:
        journal.seek(offset)
        entry: dict[str, Any] = parse_line(self.journal_path, offset, journal.readline()[:-1])
        if entry["id"] != prompt.id or ("reject" not in entry and entry["prompt_tokens"] != len(prompt.input_ids)):
            raise ArtifactError(
                f"{self.journal_path} at byte {offset}: the line is not the answer to prompt {prompt.id} of "
                f"{len(prompt.input_ids)} tokens; remove {self.journal_path.name} to generate this dataset again"
            )
        return entry

    def _index(self) -> tuple[Any, int]:
        """(byte offset of each row's first line or −1, number of later lines for a row that has one)."""
        offsets = np.full(len(self.table), -1, dtype=np.int64)
        num_doubled = 0
        for offset, row, _ in self._lines():
            if offsets[row] < 0:
                offsets[row] = offset
            else:
                num_doubled += 1
        return offsets, num_doubled

    def _replay(self) -> None:
        for _, row, entry in self._lines():
            is_reject = "reject" in entry
            if self.table.states[row] == PENDING:
                self.table.states[row] = REJECTED if is_reject else DONE
                if is_reject:
                    self.num_rejected_by_reason[entry["reject"]] += 1
                else:
                    self.sample.add(len(entry["output_ids"]), self.lengths.count)
                    self.lengths.add_entry(entry)

    def _lines(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(offset, row, entry) of every line that belongs to a prompt; damaged lines are reported and redone."""
        self.num_bad_lines = 0
        for offset, _, line in read_journal(self.journal_path):
            try:
                entry = parse_line(self.journal_path, offset, line)
            except ArtifactError as error:
                self.num_bad_lines += 1
                log.warning("bad journal line, its record is generated again: %s", error)
                continue
            row = self.table.find(str(entry["id"]))
            if row >= 0:
                yield offset, row, entry

    def _maybe_finish(self) -> None:
        if self.share.num_pending <= 0 and self.share.in_flight == 0 and not self.finished.done():
            self.finished.set_result(None)


def check_rejects(manifest: Manifest, limit: float, folder: Path) -> Manifest:
    """Return `manifest`, or raise `TooManyRejects` if the share of its rejected records is above `limit`."""
    total = manifest.counts.num_in
    if total and manifest.counts.rejected / total > limit:
        raise TooManyRejects(
            f"dataset {manifest.name}: {manifest.counts.rejected} of {total} records rejected {manifest.rejected_by_reason}, "
            f"limit {limit:.0%}; read {folder / REJECTS_NAME}, or raise generation.reject_limit"
        )
    return manifest


def require_dataset(config: RunConfig, run: RunFolder, name: str) -> None:
    """Raise `ConfigError` if `name` is neither configured nor prepared."""
    if name in {dataset.name for dataset in config.prompts.datasets}:
        return
    try:
        load_manifest(run.prompts(name))
    except ArtifactError as error:
        known = ", ".join(dataset.name for dataset in config.prompts.datasets) or "none"
        raise ConfigError(f"dataset {name!r} is not configured; configured: {known}") from error
