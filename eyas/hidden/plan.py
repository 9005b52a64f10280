"""Which records go to which shard: decided by the responses alone, so that every restart decides alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from eyas.config import RunConfig
from eyas.errors import ArtifactError, GateError, RecordError
from eyas.hidden.codec import bytes_per_token
from eyas.hidden.kind import StoreKind, resolve_kind
from eyas.hidden.store.shard import Quarantined, ShardEntry, load_entry
from eyas.manifest import verify_manifest
from eyas.merging.records import RESPONSES_NAME, RecordRules, ResponseRecord, id_of, parse_record, read_lines
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder


class ShardPlan(BaseModel):
    """One shard to be: lines [start, end) (bytes) of a dataset's responses; `digest` covers their content addresses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    number: int
    start: int
    end: int
    first_line: int
    num_records: int
    num_tokens: int
    digest: str
    is_heldout: bool | None = None
    """Under a disk budget: of its lines only held-out records, or only the others. None takes all."""

    @property
    def name(self) -> str:
        """Name of the shard's files without suffix."""
        return f"shard-{self.dataset}-{self.number:05d}"

    @property
    def is_windowed(self) -> bool:
        """True if training extracts this shard each time that it needs it, and removes it."""
        return self.is_heldout is False


def plan_shards(run: RunFolder, config: RunConfig, dataset: str) -> list[ShardPlan]:
    """The shards of a dataset that are stored for good: all of `planned`, or under a disk budget those of held-out records."""
    return [plan for plan, _ in planned(run, config, dataset) if not plan.is_windowed]


def planned(run: RunFolder, config: RunConfig, dataset: str) -> list[tuple[ShardPlan, dict[str, int]]]:
    """Cut a dataset's responses, in their order, into shards of about `hidden.shard_bytes`; each with its ids and their lengths.

    Under a disk budget a shard is at most about a sixteenth of it, and held-out records have shards of their own.
    Raises `ArtifactError` where the responses are not what their manifest says, `GateError` where they are
    unfinished or none of them can be used.
    """
    spec = load_target(config.target)
    folder = run.responses(dataset)
    manifest = verify_manifest(folder)
    if not manifest.is_complete:
        raise GateError(f"responses of {dataset} are unfinished: {manifest.counts.pending} pending; run the generation again")
    kind = resolve_kind(run, config.hidden, spec)
    budget = config.hidden.disk_budget
    shard_bytes = min(config.hidden.shard_bytes, budget // 16) if budget else config.hidden.shard_bytes
    most_tokens = max(1, shard_bytes // bytes_per_token(spec.hidden_size, kind.codec))
    path = folder / RESPONSES_NAME
    plans: list[tuple[ShardPlan, dict[str, int]]] = []
    for part in (True, False) if budget else (None,):
        state = _Open(dataset, kind, 0, 1, part)
        for line in checked_lines(path, record_rules(config, spec, dataset), is_heldout=part):
            state.add(line)
            if state.num_tokens >= most_tokens:
                plans.append((state.close(len(plans), line.end), state.lengths))
                state = _Open(dataset, kind, line.end, line.number + 1, part)
        if state.num_lines:
            plans.append((state.close(len(plans), path.stat().st_size), state.lengths))
    if plans and not sum(plan.num_records for plan, _ in plans):
        raise GateError(f"dataset {dataset}: none of its responses in {path} can be used; mend its generation or take it out")
    return plans


class Line(BaseModel):
    """One non-blank line of a response file: its record, or why it has none."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    number: int
    end: int
    record: ResponseRecord | None
    reject: Quarantined | None


def planned_lines(run: RunFolder, rules: RecordRules, plan: ShardPlan) -> Iterator[Line]:
    """The lines of a planned shard, checked."""
    path = run.responses(plan.dataset) / RESPONSES_NAME
    return checked_lines(path, rules, start=plan.start, end=plan.end, first_line=plan.first_line, is_heldout=plan.is_heldout)


def checked_lines(
    path: Path,
    rules: RecordRules,
    *,
    start: int = 0,
    end: int | None = None,
    first_line: int = 1,
    is_heldout: bool | None = None,
) -> Iterator[Line]:
    """Check the lines [start, end) of a response file; of one part, what has no record goes with the held-out ones."""
    for line in _lines(path, rules, start=start, end=end, first_line=first_line):
        if is_heldout is None or is_heldout == (line.record is None or line.record.is_heldout):
            yield line


def _lines(path: Path, rules: RecordRules, *, start: int, end: int | None, first_line: int) -> Iterator[Line]:
    pending: tuple[int, bytes] | None = None
    size = path.stat().st_size if end is None else end
    for position, number, content in read_lines(path, rules.max_line_bytes, start=start, end=end):
        if pending is not None:
            yield _check(path, rules, *pending, end=position)
        pending = (first_line + number - 1, content) if content else None
    if pending is not None:
        yield _check(path, rules, *pending, end=size)


def record_rules(config: RunConfig, spec: TargetSpec, dataset: str) -> RecordRules:
    """The rules of the merge: what it keeps is what gets states."""
    merging = config.merging
    return RecordRules(
        dataset=dataset, vocab_size=spec.vocab_size, max_tokens=merging.max_tokens, max_line_bytes=merging.max_line_bytes
    )


def finished_entry(run: RunFolder, plan: ShardPlan, kind: StoreKind) -> ShardEntry | None:
    """The sidecar of a plan's shard if it is whole and holds exactly these records; None means: extract it."""
    try:
        entry = load_entry(run.hidden / f"{plan.name}.json")
    except ArtifactError:
        return None
    path = run.hidden / entry.file_name
    fits = entry.name == plan.name and entry.kind == kind.digest() and entry.plan == plan.digest
    return entry if fits and path.is_file() and path.stat().st_size == entry.size_bytes else None


def _check(path: Path, rules: RecordRules, number: int, content: bytes, *, end: int) -> Line:
    try:
        return Line(number=number, end=end, record=parse_record(content, rules), reject=None)
    except RecordError as error:
        where = f"responses/{rules.dataset}/{path.name}:{number}"
        reject = Quarantined(id=id_of(content), reason=error.reason, where=where, detail=str(error))
        return Line(number=number, end=end, record=None, reject=reject)


class _Open:
    """A plan that is being filled."""

    def __init__(self, dataset: str, kind: StoreKind, start: int, first_line: int, is_heldout: bool | None) -> None:
        self.dataset, self.kind, self.start, self.first_line = dataset, kind, start, first_line
        self.is_heldout = is_heldout
        self.lengths: dict[str, int] = {}
        self.num_lines = self.num_records = self.num_tokens = 0
        self._digest = hashlib.blake2b(kind.digest().encode(), digest_size=16)

    def add(self, line: Line) -> None:
        self.num_lines += 1
        if line.record is not None:
            self.num_records += 1
            self.num_tokens += len(line.record.tokens)
            record = line.record
            self.lengths[record.id] = len(record.tokens)
            self._digest.update(f"{record.id} {self.kind.address(record.tokens)} {record.prompt_tokens}\n".encode())
        elif line.reject is not None:
            self._digest.update(f"{line.reject.where} {line.reject.reason}\n".encode())

    def close(self, number: int, end: int) -> ShardPlan:
        return ShardPlan(
            dataset=self.dataset,
            number=number,
            start=self.start,
            end=end,
            first_line=self.first_line,
            num_records=self.num_records,
            num_tokens=self.num_tokens,
            digest=self._digest.hexdigest(),
            is_heldout=self.is_heldout,
        )
