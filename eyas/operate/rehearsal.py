"""The phases after generation, gone through with the first replies while the others are still being made.

Whatever would fail after days of generation (a source that refuses, a draft that does not fit, an export that
no engine loads) fails in the first hour instead. Everything is real but small: the first replies of the
journals, their merged order, their states, a few training steps at the configured batch, the export.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
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
    share = -(-records // max(1, len(config.prompts.datasets)))
    wanted = {dataset.name: share for dataset in config.prompts.datasets}
    taken = first_replies(run, config, RunFolder(root), wanted=wanted, holds_out=True)
    small = small_config(config, taken, draft={"max_steps": STEPS, "eval_every": STEPS, "eval_records": HELDOUT})
    folder = open_run(root, small)
    result: dict[str, Any] = {"at": now(), "records": taken, "seconds": {}}
    for name, step in _steps(folder, small):
        started = time.monotonic()
        step()
        result["seconds"][name] = round(time.monotonic() - started, 2)
    if config.draft.baseline:
        result["baseline"] = _baseline(folder, config)
    result["export_bytes"] = sum(path.stat().st_size for path in folder.export.glob("*") if path.is_file())
    write_json(run.root / RESULT, result)
    shutil.rmtree(root)
    return result


def small_config(config: RunConfig, datasets: Mapping[str, int], *, draft: Mapping[str, Any]) -> RunConfig:
    """The run's config on the datasets that have replies, with other settings of the `draft`."""
    raw = config.model_dump(mode="json")
    raw["prompts"]["datasets"] = [item for item in raw["prompts"]["datasets"] if item["name"] in datasets]
    raw["merging"]["mixture"] = {name: weight for name, weight in raw["merging"]["mixture"].items() if name in datasets}
    raw["draft"] |= draft
    raw["hidden"]["probe_records"] = min(raw["hidden"]["probe_records"], HELDOUT)
    raw["hidden"]["disk_budget"] = 0  # so few states are stored
    return RunConfig.model_validate(raw)


def first_replies(
    run: RunFolder, config: RunConfig, to: RunFolder, *, wanted: Mapping[str, int], holds_out: bool
) -> dict[str, int]:
    """Write the first `wanted` accepted replies of each dataset as finished responses of `to`; how many of each that has any.

    With `holds_out` a few are held out whatever their split, so that replays are gone through even where no held-out reply
    is there yet; otherwise each keeps its split. Raises `ArtifactError` if there are none.
    """
    taken: dict[str, int] = {}
    for dataset in config.prompts.datasets:
        entries = {entry["id"]: entry for entry in _accepted(run.responses(dataset.name), wanted[dataset.name])}
        if not entries:
            continue
        table = PromptTable(run.prompts(dataset.name) / PROMPTS_NAME)
        prompts = [prompt for prompt in table.rows() if prompt.id in entries]
        if holds_out:
            heldout = min(len(prompts) // 2, HELDOUT)
            prompts = [_split(prompt, number < heldout) for number, prompt in enumerate(prompts)]
        _write(to.responses(dataset.name), dataset.name, [(prompt, entries[prompt.id]) for prompt in prompts])
        taken[dataset.name] = len(prompts)
    if not taken:
        raise ArtifactError(f"{run.root / 'responses'} holds no accepted reply yet; wait for the first {sum(wanted.values())}")
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


def _baseline(run: RunFolder, config: RunConfig) -> dict[str, Any] | None:
    """What the draft to beat does on the replies that were held out here: known before the long phases."""
    from eyas.draft.baseline import replay_baseline
    from eyas.draft.corpus import Corpus
    from eyas.target.spec import load_target

    return replay_baseline(run, config, load_target(config.target), Corpus.open(run))


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
