"""The phases after generation, gone through with the first replies while the others are still being made.

Whatever would fail after days of generation (a source that refuses, a draft that does not fit, an export that
no engine loads) fails in the first hour instead. Everything is real but small: the first replies of the
journals, their merged order, their states, a few training steps at the configured batch, the export.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from eyas.config import RunConfig
from eyas.errors import ArtifactError
from eyas.files import atomic_file, digest_json, write_json
from eyas.generation.dataset import REJECTS_NAME, STAGE, TOKENIZED_NAME, VERSION
from eyas.generation.journal import parse_line, read_journal
from eyas.generation.records import PROMPTS_NAME, Prompt, PromptTable, tokenized_line
from eyas.manifest import Counts, Manifest, file_entries, now
from eyas.operate.pipeline import open_run, train_in_child
from eyas.workspace import RunFolder

RECORDS = 64
"""Replies that a rehearsal takes, over all datasets."""
STEPS = 4
HELDOUT = 4
FOLDER, RESULT = "rehearsal", "rehearsal.json"


def rehearse(run: RunFolder, config: RunConfig, *, records: int = RECORDS) -> dict[str, Any]:
    """Merge, extract, train and export the first replies; writes and returns `rehearsal.json`.

    Raises the `EyasError` of the phase that fails, and leaves the small run's folder for a look.
    """
    root = run.root / FOLDER
    shutil.rmtree(root, ignore_errors=True)
    taken = first_replies(run, config, RunFolder(root), records=records)
    small = small_config(config, taken)
    folder = open_run(root, small)
    result: dict[str, Any] = {"at": now(), "records": taken, "seconds": {}}
    for name, step in _steps(folder, small):
        started = time.monotonic()
        step()
        result["seconds"][name] = round(time.monotonic() - started, 2)
    result["export_bytes"] = sum(path.stat().st_size for path in folder.export.glob("*") if path.is_file())
    write_json(run.root / RESULT, result)
    shutil.rmtree(root)
    return result


def small_config(config: RunConfig, datasets: dict[str, int]) -> RunConfig:
    """The run's config on the datasets that have replies, with as little training as still goes through every step of it."""
    raw = config.model_dump(mode="json")
    raw["prompts"]["datasets"] = [item for item in raw["prompts"]["datasets"] if item["name"] in datasets]
    raw["merging"]["mixture"] = {name: weight for name, weight in raw["merging"]["mixture"].items() if name in datasets}
    raw["draft"] |= {"max_steps": STEPS, "eval_every": STEPS, "eval_records": HELDOUT}
    raw["hidden"]["probe_records"] = min(raw["hidden"]["probe_records"], HELDOUT)
    return RunConfig.model_validate(raw)


def first_replies(run: RunFolder, config: RunConfig, to: RunFolder, *, records: int) -> dict[str, int]:
    """Write the first accepted replies as finished responses of `to`; the number of each dataset that has any.

    The last few are held out whatever their split, so that replays are gone through, too. Raises `ArtifactError` if there are none.
    """
    share = -(-records // max(1, len(config.prompts.datasets)))
    taken: dict[str, int] = {}
    for dataset in config.prompts.datasets:
        entries = {entry["id"]: entry for entry in _accepted(run.responses(dataset.name), share)}
        if not entries:
            continue
        table = PromptTable(run.prompts(dataset.name) / PROMPTS_NAME)
        prompts = [prompt for prompt in table.rows() if prompt.id in entries]
        heldout = min(len(prompts) // 2, HELDOUT)
        _write(to.responses(dataset.name), dataset.name, [(_split(p, n < heldout), entries[p.id]) for n, p in enumerate(prompts)])
        taken[dataset.name] = len(prompts)
    if not taken:
        raise ArtifactError(f"{run.root / 'responses'} holds no accepted reply yet; a rehearsal needs the first {records}")
    return taken


def _accepted(folder: Path, limit: int) -> Iterator[dict[str, Any]]:
    """The first accepted entries of the journal that was written last."""
    journals = sorted(folder.glob("journal-*.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = read_journal(journals[-1]) if journals else iter(())
    for offset, _, line in lines:
        entry: dict[str, Any] = parse_line(journals[-1], offset, line)
        if "output_ids" in entry and limit > 0:
            limit -= 1
            yield entry
        if limit <= 0:
            return


def _split(prompt: Prompt, is_heldout: bool) -> Prompt:
    return replace(prompt, split="heldout" if is_heldout else "train")


def _write(folder: Path, dataset: str, rows: list[tuple[Prompt, dict[str, Any]]]) -> None:
    folder.mkdir(parents=True)
    with atomic_file(folder / TOKENIZED_NAME) as output, atomic_file(folder / REJECTS_NAME):
        for prompt, entry in rows:
            output.write(tokenized_line(dataset, prompt, entry))
    Manifest(
        stage=STAGE,
        stage_version=VERSION,
        name=dataset,
        fingerprint=digest_json(["rehearsal", *(prompt.id for prompt, _ in rows)]),
        counts=Counts.of(done=len(rows)),
        files=file_entries(folder, [TOKENIZED_NAME, REJECTS_NAME]),
    ).write(folder)


def _steps(run: RunFolder, config: RunConfig) -> list[tuple[str, Callable[[], object]]]:
    from eyas.draft.export import export_draft
    from eyas.hidden.extract import extract
    from eyas.merging.merge import merge

    return [
        ("merge", lambda: merge(run, config)),
        ("extract", lambda: extract(run, config)),
        ("train", lambda: train_in_child(run)),
        ("export", lambda: export_draft(run, config)),
    ]
