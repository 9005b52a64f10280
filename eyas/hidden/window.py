"""Hidden states within a disk budget: a reader like `HiddenStore` whose shards come and go as training reads them.

Held-out states are stored for good. Every other shard is extracted when it is about to be read, by one child
process (`eyas.hidden.producer`), and removed after its last record; the child is asked only for what fits into
the budget beside what is not yet read, so it is never further ahead than that. A shard is the same bytes each
time, so what is read is what a whole store would give. The sidecar of a removed shard stays: it says what the
shard was and which of its records have no states.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from eyas.config import RunConfig
from eyas.errors import ArtifactError
from eyas.hidden.disk import window_of
from eyas.hidden.plan import ShardPlan, finished_entry, planned
from eyas.hidden.producer import Producer
from eyas.hidden.store.reader import HiddenStore, Record, read_record
from eyas.hidden.store.shard import Shard, load_entry, open_shard
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)


def open_store(run: RunFolder, config: RunConfig) -> HiddenStore:
    """The reader of a run's states: `WindowedStore` under a disk budget."""
    return WindowedStore(run, config) if config.hidden.disk_budget else HiddenStore(run.hidden)


def shared_threads(config: RunConfig) -> tuple[int, int]:
    """Torch threads of (extraction, training) when both compute on this machine at once: half of the cores each, unless
    `hidden.threads` or `draft.threads` says otherwise. 0 leaves training what it takes alone: then servers extract, or a GPU."""
    cores = os.cpu_count() or 1
    extracting = config.hidden.threads or max(1, cores // 2)
    is_shared = config.hidden.source == "transformers" and not torch.cuda.is_available()
    return extracting, config.draft.threads or (max(1, cores - extracting) if is_shared else 0)


class WindowedStore(HiddenStore):
    """The reader of a run under `hidden.disk_budget`; raises what `HiddenStore` raises, and what the extraction does."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        super().__init__(run.hidden)
        self._run, self._config = run, config
        self._plans: dict[str, ShardPlan] = {}
        for dataset in config.prompts.datasets:
            for plan, lengths in planned(run, config, dataset.name):
                self._plans[plan.name] = plan
                if plan.is_windowed:
                    for record_id, num_tokens in lengths.items():
                        self._rows.setdefault(record_id, (plan.name, -1, num_tokens))
        window = window_of(list(self._plans.values()), config.hidden.disk_budget, self.hidden_size, self.kind.codec)
        self._sizes, self._room_bytes = window.shards, window.room_bytes
        self._coming: deque[str] = deque()
        self._held: set[str] = set()
        self._left: Counter[str] = Counter()
        self._rows_of: dict[str, dict[str, int]] = {}
        self._producer: Producer | None = None
        self._waited_s, self._num_read = 0.0, 0

    def ids(self) -> list[str]:
        """Ids of all records, ascending, those that are yet to be extracted included."""
        return sorted(self._rows)

    def windows(self, ids: Sequence[str], generator: torch.Generator) -> list[list[str]]:
        """An epoch's order: shards at random, as many to a window as fill half the budget, the records of a window at random."""
        by_shard: dict[str, list[str]] = {}
        for record_id in ids:
            by_shard.setdefault(self._row(record_id)[0], []).append(record_id)
        names = sorted(by_shard)
        windows: list[list[str]] = []
        room = 0
        for index in torch.randperm(len(names), generator=generator).tolist():
            size = self._sizes[names[index]]
            if not windows or size > room:
                windows.append([])
                room = self._room_bytes // 2
            windows[-1] += by_shard[names[index]]
            room -= size
        return [[window[index] for index in torch.randperm(len(window), generator=generator).tolist()] for window in windows]

    def expect(self, ids: Sequence[str]) -> None:
        """See `HiddenStore.expect`: what is stored is kept, other shards are asked for in the order of their first record."""
        left = Counter(shard for shard in (self._row(record_id)[0] for record_id in ids) if shard in self._sizes)
        if not left:
            return
        if self._producer is not None and self._producer.pending:
            self.close()  # what the schedule before this one asked for would come beside what this one has room for
        self._left, self._coming, self._held = left, deque(left), set()  # a Counter keeps the order of first sight
        room = self._room_bytes
        for name in self._sizes:
            self._shards.pop(name, None)
        for name in left:
            room -= self._sizes[name]
            if room < 0 or finished_entry(self._run, self._plans[name], self.kind) is None:
                break
            self._held.add(name)
        for name in self._sizes:
            if name not in self._held:
                self._remove(name)
        self._ask()

    def record(self, record_id: str) -> Record:
        """See `HiddenStore`; a record whose states were refused comes with zeros and teaches nothing. Each may be read as
        often as it was expected."""
        shard, _, num_tokens = self._row(record_id)
        if shard not in self._sizes:
            return super().record(record_id)
        if not self._left[shard]:
            raise ArtifactError(
                f"record {record_id} of {shard} was not expected: a store under hidden.disk_budget is read in order"
            )
        opened = self._open(shard)
        row = self._rows_of[shard].get(record_id)
        if row is not None:
            record = read_record(opened, row, num_tokens, self.kind, f"record {record_id} in {self.folder / shard}")
        else:
            logger.warning("record=%s of %s has no states and teaches nothing", record_id, shard)
            record = self._blank(num_tokens)
        self._left[shard] -= 1
        if not self._left[shard]:
            self._remove(shard)
            self._held.discard(shard)
            self._ask()
        return record

    def refused(self) -> set[str]:
        """Ids without states among the records that have been extracted while training."""
        found: set[str] = set()
        for name in self._sizes:
            path = self.folder / f"{name}.json"
            if path.is_file():
                found |= {item.id for item in load_entry(path).quarantined if item.id is not None}
        return found

    def figures(self) -> dict[str, Any]:
        """Of this process: shards read, and seconds that reading waited for them."""
        return {"window_shards": self._num_read, "window_wait_s": round(self._waited_s, 1)}

    def close(self) -> None:
        """End the extraction; shards that are not read yet stay for the next run."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _open(self, shard: str) -> Shard:
        if shard in self._sizes and shard not in self._shards:
            begun = time.monotonic()
            while self._producer is not None and shard in self._producer.pending:
                self._producer.wait()  # its answer, not its file: another process may have written that, and ours would miss it
            self._waited_s += time.monotonic() - begun
            entry = load_entry(self.folder / f"{shard}.json")
            self._shards[shard] = open_shard(self.folder, entry, self.kind, checks_digest=True)
            self._rows_of[shard] = {record_id: row for row, record_id in enumerate(entry.ids)}
            self._num_read += 1
        return super()._open(shard)

    def _ask(self) -> None:
        """Ask for the next shards as long as the budget has room for them."""
        while self._coming:
            name = self._coming[0]
            if name not in self._held:
                if sum(self._sizes[item] for item in self._held) + self._sizes[name] > self._room_bytes:
                    return
                self._held.add(name)
                self._extracting().ask(self._plans[name])
            self._coming.popleft()

    def _extracting(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(self._run, self._config, threads=shared_threads(self._config)[0])
        return self._producer

    def _remove(self, shard: str) -> None:
        self._shards.pop(shard, None)
        self._rows_of.pop(shard, None)
        (self.folder / f"{shard}.safetensors").unlink(missing_ok=True)

    def _blank(self, num_tokens: int) -> Record:
        top = 1 + 2 * self.kind.num_top
        return Record(
            tokens=torch.zeros(num_tokens, dtype=torch.int32),
            loss_mask=torch.zeros(num_tokens, dtype=torch.uint8),
            aux=torch.zeros(num_tokens, 3 * self.hidden_size, dtype=torch.bfloat16),
            final=torch.zeros(num_tokens, top) if self.kind.num_top else torch.zeros(num_tokens, self.hidden_size).bfloat16(),
        )
