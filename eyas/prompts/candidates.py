"""One dataset's rows become candidates: converted, cleaned, rendered and measured, or rejected with a reason.

Candidates know nothing of other datasets; `selection.py` decides which of them become prompts. Python
prepares a batch while the tokenizer encodes the one before with the interpreter lock released, so two
cores are busy without a second process, and the order of rows is the source's own: the bytes do not
depend on threads. Memory is a few batches (at most 4 MB of text each), whatever the source's size.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from eyas.errors import ConfigError, RecordError
from eyas.files import atomic_file, fsync_folder, json_line
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, now
from eyas.progress import Progress, Report, silent
from eyas.prompts.cleaning import clean, prompt_cuts
from eyas.prompts.config import DatasetConfig, PromptsConfig
from eyas.prompts.contamination import Contamination
from eyas.prompts.conversation import Conversation, dump, hash16, record_id, texts_of
from eyas.prompts.converters import convert
from eyas.prompts.duplicates import SIGNATURE_BYTES, SIGNATURE_VERSION, signature
from eyas.prompts.fields import FieldMapping
from eyas.prompts.language import LanguageFilter
from eyas.prompts.readers import Row
from eyas.prompts.sources import Source
from eyas.prompts.tools import as_text
from eyas.prompts.words import words_of
from eyas.target.probe import TemplateTraits
from eyas.target.rendering import Renderer

VERSION = 1
STAGE = "candidates"
FILE_NAME = "candidates.arrow"
REJECTS_NAME = "rejects.jsonl"
CONTEXT_MARGIN = 8
"""Tokens of context that neither prompt nor response may take: engines differ by a few at the very end."""

SCHEMA = pa.schema(
    [
        ("id", pa.binary(16)),
        ("conversation", pa.binary(16)),
        ("prompt", pa.binary(16)),  # hash of messages and tools: equal prompts of any dataset
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("opens_think", pa.bool_()),
        ("num_tokens", pa.int32()),
        ("signature", pa.binary(SIGNATURE_BYTES)),
        ("contamination", pa.string()),
        ("where", pa.string()),
    ]
)

_BATCH_ROWS = 256
_BATCH_CHARS = 1 << 20
_MAX_CHARS_PER_TOKEN = 32
_REPORT_ROWS = 2_000


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that turns rows of any dataset into candidates: the target's renderer and the selection's rules."""

    renderer: Renderer
    traits: TemplateTraits
    contamination: Contamination
    config: PromptsConfig

    @property
    def max_prompt_tokens(self) -> int:
        room = self.renderer.spec.context_length - self.config.min_response_room - CONTEXT_MARGIN
        return min(self.config.max_prompt_tokens or room, room)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A prompt before encoding: the columns that are known, and its text or what is wrong with it."""

    where: str
    columns: dict[str, Any] | None = None
    text: str = ""
    problem: RecordError | None = None


def candidates_fingerprint(preparation: Preparation, dataset: DatasetConfig, source: Source, benchmarks: dict[str, str]) -> str:
    """Digest of all that changes the candidates' bytes; quotas, seeds and shares do not."""
    wanted = dataset.model_dump(include={"name", "converter", "fields", "max_rows", "tools", "every_turn"})
    rules = preparation.config.model_dump(include={"same_role_turns", "contamination_ngram", "languages", "max_row_bytes"})
    return fingerprint(
        STAGE,
        VERSION,
        inputs={"tokenizer": preparation.renderer.spec.tokenizer_fingerprint, **benchmarks},
        config={
            "source": source.identity,
            "dataset": wanted,
            "rules": rules,
            "max_prompt_tokens": preparation.max_prompt_tokens,
            "signature": SIGNATURE_VERSION,
            "reasoning": preparation.renderer.reasoning.name,
        },
    )


def write_candidates(
    folder: Path,
    preparation: Preparation,
    dataset: DatasetConfig,
    source: Source,
    wanted_fingerprint: str,
    report: Report = silent,
) -> Manifest:
    """Read the source and write `folder`; a finished folder of the same fingerprint is kept as it is.

    A folder without a manifest is what a killed process left: it is made anew. Raises `ConfigError`
    where the source is unreadable or no row of its head has the fields that the config names.
    """
    finished = finished_manifest(folder, wanted_fingerprint)
    if finished is not None:
        return finished
    shutil.rmtree(folder, ignore_errors=True)
    started_at = now()
    account = _Account()
    with (
        atomic_file(folder / FILE_NAME) as data,
        atomic_file(folder / REJECTS_NAME) as rejects,
        pa.ipc.new_stream(data, SCHEMA) as writer,
    ):
        for batch in _encoded(_batches(_drafts(preparation, dataset, source, account)), preparation.renderer):
            _write_batch(batch, preparation, writer, rejects, account)
            if account.num_seen >= account.next_report:
                account.next_report += _REPORT_ROWS
                report(Progress(stage="prepare", name=dataset.name, done=account.num_seen, total=0, unit="rows"))
        if not account.num_rows:
            raise ConfigError(f"dataset {dataset.name}: source {dataset.source!r} holds no row; correct prompts.datasets")
    fsync_folder(folder)
    report(Progress(stage="prepare", name=dataset.name, done=account.num_rows, total=account.num_rows, unit="rows", is_final=True))
    return Manifest(
        stage=STAGE,
        stage_version=VERSION,
        name=dataset.name,
        fingerprint=wanted_fingerprint,
        counts=Counts.of(done=account.num_done, rejected=sum(account.rejected.values())),
        rejected_by_reason=dict(sorted(account.rejected.items())),
        files=file_entries(folder, [FILE_NAME, REJECTS_NAME]),
        figures={"rows": account.num_rows, "repairs": dict(sorted(account.repairs.items()))},
        started_at=started_at,
    ).write(folder)


class _Account:
    """What was read, kept, repaired and rejected so far."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_done = 0
        self.next_report = _REPORT_ROWS
        self.rejected: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()

    @property
    def num_seen(self) -> int:
        return self.num_done + sum(self.rejected.values())


def _drafts(preparation: Preparation, dataset: DatasetConfig, source: Source, account: _Account) -> Iterator[_Draft]:
    mapping = FieldMapping(dataset)
    languages = LanguageFilter(preparation.config.languages)
    converter = dataset.converter if dataset.converter != "auto" else source.converter
    for row in source.rows():
        if dataset.max_rows and account.num_rows >= dataset.max_rows:
            break
        account.num_rows += 1
        try:
            yield from _prompts_of(row, preparation, dataset, converter, mapping, languages, account)
        except RecordError as error:
            yield _Draft(where=row.where, problem=error)
        except RecursionError:
            yield _Draft(where=row.where, problem=RecordError("too_deep", "the row's JSON is nested too deep"))
    mapping.check_seen()


def _prompts_of(
    row: Row,
    preparation: Preparation,
    dataset: DatasetConfig,
    converter: str,
    mapping: FieldMapping,
    languages: LanguageFilter,
    account: _Account,
) -> Iterator[_Draft]:
    if row.problem is not None:
        raise row.problem
    traits = preparation.traits
    conversation = clean(
        _for_template(convert(mapping.apply(row.value), converter), dataset, traits, account.repairs),
        account.repairs,
        same_role_turns=preparation.config.same_role_turns,
        allows_system=traits.renders_system,
        allows_middle_system=traits.renders_middle_system,
    )
    cuts = prompt_cuts(conversation.messages, every_turn=dataset.every_turn)
    whole = conversation.messages[: cuts[-1]]
    try:
        whole_text, tools = dump(whole), dump(conversation.tools)
    except ValueError as error:
        raise RecordError("bad_number", f"a tool or its arguments hold a number that is no JSON: {error}") from error
    texts = texts_of(whole)
    languages.check(texts)
    words = words_of(texts)
    shared = {
        "conversation": hash16(whole_text),
        "tools": tools,
        "signature": signature(words),
        "contamination": preparation.contamination.find(words),
        "where": row.where,
    }
    for turn, cut in enumerate(cuts):
        yield _draft(conversation, cut, turn if dataset.every_turn else 0, shared, preparation, dataset.name)


def _for_template(
    conversation: Conversation, dataset: DatasetConfig, traits: TemplateTraits, repairs: Counter[str]
) -> Conversation:
    """The conversation as this template can hold it: tools natively, or as text where the config or the template wants it."""
    has_calls = any(message.get("tool_calls") for message in conversation.messages)
    if not conversation.tools and not has_calls:
        return conversation
    is_native = (not conversation.tools or traits.renders_tools) and (not has_calls or traits.renders_tool_calls)
    if dataset.tools == "native" and not is_native:
        raise RecordError(
            "tools_not_rendered",
            f"the chat template ignores tools; set tools of dataset {dataset.name} to text, or leave it at auto",
        )
    if dataset.tools == "text" or not is_native:
        repairs["tools_as_text"] += 1
        return as_text(conversation, keeps_tool_role=traits.renders_tool_role)
    return conversation


def _draft(
    conversation: Conversation, cut: int, turn: int, shared: dict[str, Any], preparation: Preparation, dataset: str
) -> _Draft:
    messages = conversation.messages[:cut]
    messages_text = dump(messages)
    columns = {
        **shared,
        "id": record_id(dataset, shared["conversation"], shared["tools"], turn),
        "prompt": hash16(messages_text, shared["tools"]),
        "messages": messages_text,
    }
    try:
        text = preparation.renderer.render_text(messages, conversation.tools)
        if len(text) > preparation.max_prompt_tokens * _MAX_CHARS_PER_TOKEN:
            limit = preparation.max_prompt_tokens
            raise RecordError("too_long", f"{len(text)} characters, which no tokenizer puts into {limit} tokens")
    except RecordError as error:
        return _Draft(where=shared["where"], columns=columns, problem=error)
    return _Draft(where=shared["where"], columns=columns, text=text)


def _batches(drafts: Iterator[_Draft]) -> Iterator[list[_Draft]]:
    batch: list[_Draft] = []
    num_chars = 0
    for draft in drafts:
        batch.append(draft)
        num_chars += len(draft.text)
        if len(batch) >= _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[list[_Draft]], renderer: Renderer) -> Iterator[tuple[list[_Draft], list[list[int]]]]:
    """Encode each batch in a second thread while the next is prepared in this one; order is kept."""
    waiting: deque[tuple[list[_Draft], Future[list[list[int]]]]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode") as pool:
        for batch in batches:
            waiting.append((batch, pool.submit(renderer.encode, [draft.text for draft in batch if draft.problem is None])))
            if len(waiting) > 1:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()


def _write_batch(
    batch: tuple[list[_Draft], list[list[int]]],
    preparation: Preparation,
    writer: Any,
    rejects: IO[bytes],
    account: _Account,
) -> None:
    drafts, encoded = batch
    ids_of = iter(encoded)
    rows = []
    limit = preparation.max_prompt_tokens
    for draft in drafts:
        problem = draft.problem
        input_ids = next(ids_of) if problem is None else []
        if problem is None and len(input_ids) > limit:
            problem = RecordError("too_long", f"{len(input_ids)} prompt tokens, at most {limit} fit")
        if problem is not None:
            record = draft.columns["id"].hex() if draft.columns else None
            rejects.write(reject_line(record, problem.reason, draft.where, str(problem)))
            account.rejected[problem.reason] += 1
            continue
        account.num_done += 1
        rendered = preparation.renderer.finish(input_ids)
        rows.append(
            {**(draft.columns or {}), "input_ids": input_ids, "opens_think": rendered.opens_think, "num_tokens": len(input_ids)}
        )
    if rows:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def reject_line(record: str | None, reason: str, where: str, detail: str) -> bytes:
    """One row of `rejects.jsonl`; the detail is cut to 300 characters."""
    return json_line({"id": record, "reason": reason, "where": where, "detail": detail[:300].encode("utf-8", "replace").decode()})
