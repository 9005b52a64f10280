"""One dataset's rows become candidates: converted, cleaned, rendered and measured, or rejected with a reason.

Candidates know nothing of other datasets; `selection.py` decides which of them become prompts. Python
prepares a batch while the tokenizer encodes the one before with the interpreter lock released, so two
cores are busy without a second process, and the order of rows is the source's own: the bytes do not
depend on threads. Memory is a few batches (256 kB of text or one prompt each), whatever the source's size.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from eyas.errors import ConfigError, RecordError
from eyas.files import atomic_file, fsync_folder, json_line
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, now
from eyas.progress import Progress, Report, silent
from eyas.prompts.config import DatasetConfig
from eyas.prompts.drafting import Account, Draft, drafts
from eyas.prompts.duplicates import SIGNATURE_BYTES, SIGNATURE_VERSION
from eyas.prompts.preparation import Preparation
from eyas.prompts.sources import Source
from eyas.target.rendering import Renderer

VERSION = 4
STAGE = "candidates"
FILE_NAME = "candidates.arrow"
REJECTS_NAME = "rejects.jsonl"

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
_BATCH_CHARS = 1 << 18
_REPORT_ROWS = 2_000


def candidates_fingerprint(preparation: Preparation, dataset: DatasetConfig, source: Source, benchmarks: dict[str, str]) -> str:
    """Digest of all that changes the candidates' bytes; quotas, seeds and shares do not."""
    wanted = dataset.model_dump(include={"name", "converter", "fields", "max_rows", "tools", "every_turn"})
    rules = preparation.config.model_dump(
        include={"same_role_turns", "control_tokens", "contamination_ngram", "languages", "max_row_bytes"}
    )
    shortest = preparation.config.min_prompt_tokens
    return fingerprint(
        STAGE,
        VERSION,
        inputs={"tokenizer": preparation.renderer.spec.tokenizer_fingerprint, **benchmarks},
        config={
            "source": source.identity,
            "dataset": wanted,
            "rules": rules,
            "max_prompt_tokens": preparation.max_prompt_tokens,
            **({"min_prompt_tokens": shortest} if shortest else {}),
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
    account, next_report = Account(), _REPORT_ROWS
    with (
        atomic_file(folder / FILE_NAME) as data,
        atomic_file(folder / REJECTS_NAME) as rejects,
        pa.ipc.new_stream(data, SCHEMA) as writer,
    ):
        for batch in _encoded(_batches(drafts(preparation, dataset, source, account)), preparation.renderer):
            _write_batch(batch, preparation, writer, rejects, account)
            if account.num_seen >= next_report:
                next_report = account.num_seen + _REPORT_ROWS
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


def _batches(drafts: Iterator[Draft]) -> Iterator[list[Draft]]:
    batch: list[Draft] = []
    num_chars = 0
    for draft in drafts:
        batch.append(draft)
        num_chars += len(draft.text)
        if len(batch) >= _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[list[Draft]], renderer: Renderer) -> Iterator[tuple[list[Draft], list[list[int]]]]:
    """Encode each batch in a second thread while the next is prepared in this one; order is kept."""
    waiting: deque[tuple[list[Draft], Future[list[list[int]]]]] = deque()
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
    batch: tuple[list[Draft], list[list[int]]],
    preparation: Preparation,
    writer: Any,
    rejects: IO[bytes],
    account: Account,
) -> None:
    drafts, encoded = batch
    ids_of = iter(encoded)
    rows = []
    shortest, limit = preparation.config.min_prompt_tokens, preparation.max_prompt_tokens
    for draft in drafts:
        problem = draft.problem
        input_ids = next(ids_of) if problem is None else []
        if problem is None and len(input_ids) > limit:
            problem = RecordError("too_long", f"{len(input_ids)} prompt tokens, at most {limit} fit")
        if problem is None and len(input_ids) < shortest:
            problem = RecordError("too_short", f"{len(input_ids)} prompt tokens, prompts.min_prompt_tokens is {shortest}")
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
