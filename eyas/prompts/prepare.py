"""Phase 1, whole: candidates per dataset, then one selection over all of them, then files and manifests.

`prepare_candidates` may run for several datasets at once; `select_prompts` needs them all. Both keep
what is finished and verifies, and make anew what is not, so a killed run ends in the same bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa

from eyas.config import RunConfig
from eyas.errors import ConfigError, TooManyRejects
from eyas.files import atomic_file
from eyas.manifest import MANIFEST_NAME, Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest
from eyas.progress import Progress, Report, silent
from eyas.prompts.candidates import REJECTS_NAME, candidates_fingerprint, reject_line, write_candidates
from eyas.prompts.config import DatasetConfig, PromptsConfig
from eyas.prompts.conversation import is_heldout
from eyas.prompts.preparation import CONTEXT_MARGIN, Preparation, benchmark_digests, load_preparation
from eyas.prompts.selection import CHOICE_REASONS, Choice, read_candidates, select
from eyas.prompts.sources import Source, open_source
from eyas.prompts.statistics import prompt_figures
from eyas.prompts.store import PROMPTS_NAME, SCHEMA, write_prompts
from eyas.target.spec import load_target
from eyas.workspace import RunFolder

VERSION = 1
STAGE = "prompts"


def prepare(run: RunFolder, config: RunConfig, report: Report = silent) -> dict[str, Manifest]:
    """Prepare every dataset of the config; returns a manifest per dataset, in the config's order."""
    return select_prompts(run, config, report)


def prepare_candidates(run: RunFolder, config: RunConfig, dataset: str, report: Report = silent) -> Path:
    """Convert, clean and render one dataset's rows; returns the folder of its candidates.

    Raises `ConfigError` where the target, the source or a field is not usable.
    """
    chosen = _dataset(config, dataset)
    preparation = load_preparation(config)
    source = open_source(chosen, max_row_bytes=config.prompts.max_row_bytes)
    wanted = candidates_fingerprint(preparation, chosen, source, benchmark_digests(config.prompts))
    folder = _candidates_folder(run, dataset, wanted)
    write_candidates(folder, preparation, chosen, source, wanted, report)
    for other in run.prompts(dataset).glob("candidates-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def select_prompts(run: RunFolder, config: RunConfig, report: Report = silent) -> dict[str, Manifest]:
    """Select over all datasets and write `prompts/<dataset>/`; candidates that are missing are made first.

    Raises `TooManyRejects` after everything is written, where a dataset's share of unusable rows is
    above `reject_limit` (duplicates, contamination, languages, short prompts and quotas do not count).
    """
    _require_datasets(config)
    folders: dict[str, Path] = {}
    inputs: dict[str, str] = {}
    for dataset in config.prompts.datasets:
        folders[dataset.name] = prepare_candidates(run, config, dataset.name, report)
        inputs[dataset.name] = load_manifest(folders[dataset.name]).digest()
    wanted = {dataset.name: _prompts_fingerprint(config, dataset, inputs) for dataset in config.prompts.datasets}
    manifests = {name: finished_manifest(run.prompts(name), wanted[name]) for name in folders}
    if any(manifest is None for manifest in manifests.values()):
        choices = select(config.prompts, folders)
        preparation = load_preparation(config)
        for number, dataset in enumerate(config.prompts.datasets, start=1):
            if manifests[dataset.name] is None:
                manifests[dataset.name] = _write_dataset(
                    run, config, dataset, folders[dataset.name], choices[dataset.name], preparation, inputs, wanted[dataset.name]
                )
            report(_progress(number, len(folders)))
    finished = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    _check_rejects(config.prompts, finished)
    return finished


def _write_dataset(
    run: RunFolder,
    config: RunConfig,
    dataset: DatasetConfig,
    candidates: Path,
    choice: Choice,
    preparation: Preparation,
    inputs: dict[str, str],
    wanted: str,
) -> Manifest:
    folder = run.prompts(dataset.name)
    (folder / MANIFEST_NAME).unlink(missing_ok=True)  # from here on the folder is unfinished
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()
    account = load_manifest(candidates)
    context_length = preparation.renderer.spec.context_length
    kept = set(choice.kept)

    def to_prompts(batch: pa.RecordBatch) -> pa.RecordBatch:
        ids = batch.column("id").to_pylist()
        chosen = []
        for index, record in enumerate(ids):
            if record in kept:
                kept.discard(record)  # a repeated row has the id of its first
                chosen.append(index)
        batch = batch.take(pa.array(chosen, pa.int32()))
        conversations = batch.column("conversation").to_pylist()
        share, longest = config.prompts.heldout_share, context_length - CONTEXT_MARGIN
        columns = {
            "id": [ids[index].hex() for index in chosen],
            "dataset": [dataset.name] * len(chosen),
            "split": ["heldout" if is_heldout(conversation, share) else "train" for conversation in conversations],
            "conversation": [conversation.hex() for conversation in conversations],
            "max_new_tokens": [min(dataset.max_new_tokens, longest - tokens) for tokens in batch.column("num_tokens").to_pylist()],
        }
        return pa.RecordBatch.from_arrays(
            [pa.array(columns[field.name], field.type) if field.name in columns else batch.column(field.name) for field in SCHEMA],
            schema=SCHEMA,
        )

    num_bytes = sum(entry.size_bytes for entry in account.files)
    write_prompts(folder, read_candidates(candidates), num_bytes, to_prompts)
    with atomic_file(folder / REJECTS_NAME) as file:
        with open(candidates / REJECTS_NAME, "rb") as earlier:
            shutil.copyfileobj(earlier, file)
        for reject in choice.rejects:
            file.write(reject_line(reject.id.hex(), reject.reason, reject.where, reject.detail))
    reasons = dict(account.rejected_by_reason)
    for reject in choice.rejects:
        reasons[reject.reason] = reasons.get(reject.reason, 0) + 1
    return Manifest(
        stage=STAGE,
        stage_version=VERSION,
        name=dataset.name,
        fingerprint=wanted,
        inputs=inputs,
        config=dataset.model_dump(),
        counts=Counts.of(done=len(choice.kept), rejected=sum(reasons.values())),
        rejected_by_reason=dict(sorted(reasons.items())),
        files=file_entries(folder, [PROMPTS_NAME, REJECTS_NAME]),
        figures={
            **account.figures,
            **prompt_figures(folder, lambda ids: str(preparation.renderer.tokenizer.decode(ids))),
            "template": preparation.traits.as_json(),
            "license": dataset.license or _source(config, dataset).license,
        },
        started_at=account.started_at,  # reading its rows is the longer part
    ).write(folder)


def _check_rejects(config: PromptsConfig, manifests: dict[str, Manifest]) -> None:
    for name, manifest in manifests.items():
        num_rejected = sum(count for reason, count in manifest.rejected_by_reason.items() if reason not in CHOICE_REASONS)
        if num_rejected > config.reject_limit * manifest.counts.num_in:
            faults = {reason: count for reason, count in manifest.rejected_by_reason.items() if reason not in CHOICE_REASONS}
            worst = sorted(faults.items(), key=lambda item: -item[1])[:3]
            raise TooManyRejects(
                f"dataset {name}: {num_rejected} of {manifest.counts.num_in} rows are unusable ({dict(worst)}), "
                f"prompts.reject_limit is {config.reject_limit:g}; "
                f"read prompts/{name}/{REJECTS_NAME}, mend the source or raise the limit"
            )


def _prompts_fingerprint(config: RunConfig, dataset: DatasetConfig, inputs: dict[str, str]) -> str:
    """Selection depends on every dataset's candidates, their order and the seed, since duplicates are found across them."""
    rules = {"heldout_share", "subsample", "seed", "near_duplicates", "near_duplicate_threshold"}
    return fingerprint(
        STAGE,
        VERSION,
        inputs=inputs,
        config={
            "rules": config.prompts.model_dump(include=rules),
            "dataset": dataset.model_dump(include={"name", "quota", "max_new_tokens"}),
            "order": [item.name for item in config.prompts.datasets],
            "context_length": load_target(config.target).context_length,
        },
    )


def _source(config: RunConfig, dataset: DatasetConfig) -> Source:
    return open_source(dataset, max_row_bytes=config.prompts.max_row_bytes)


def _dataset(config: RunConfig, name: str) -> DatasetConfig:
    for dataset in config.prompts.datasets:
        if dataset.name == name:
            return dataset
    known = ", ".join(dataset.name for dataset in config.prompts.datasets) or "none"
    raise ConfigError(f"dataset {name!r} is not in prompts.datasets (known: {known}); correct the name")


def _require_datasets(config: RunConfig) -> None:
    if not config.prompts.datasets:
        raise ConfigError("prompts.datasets is empty; name at least one dataset with its source")


def _candidates_folder(run: RunFolder, dataset: str, wanted: str) -> Path:
    return run.prompts(dataset) / f"candidates-{wanted[:16]}"


def _progress(done: int, total: int) -> Progress:
    return Progress(stage="prepare", name="", done=done, total=total, unit="datasets", is_final=done == total)
