"""How much a run holds: prompts, tokens and bytes, counted where they exist and assumed, saying so, where not.

The account begins with the config alone (quotas and caps), and each phase that finishes replaces an
assumption by a count. Nothing is read but manifests, Parquet footers and progress messages.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from pydantic import BaseModel

from eyas.config import RunConfig
from eyas.errors import ArtifactError
from eyas.manifest import Manifest, load_manifest
from eyas.operate.messages import ProgressMessage, read_progress
from eyas.prompts.config import DatasetConfig
from eyas.workspace import RunFolder

ASSUMED_PROMPT_TOKENS = 300
ASSUMED_RESPONSE_TOKENS = 1_400
"""Mean of the reference run's first answers; a smaller cap takes its place."""
_MIN_REPLIES = 64


class DatasetVolume(BaseModel):
    """One dataset: tokens are sums over its records; `cap_tokens` is what they cannot exceed."""

    dataset: str
    num_prompts: int
    prompt_tokens: int
    response_tokens: int
    cap_tokens: int
    done_records: int = 0
    is_counted: bool = False
    is_known: bool = True
    """False before phase 1 where no quota says how many prompts there will be; all numbers are then lower bounds."""
    basis: str


class Volumes(BaseModel):
    """All datasets together, and what of their tokens goes on to extraction and training."""

    datasets: list[DatasetVolume]
    merged_tokens: int
    train_share: float

    @property
    def is_known(self) -> bool:
        """True if the number of prompts of every dataset is known."""
        return all(dataset.is_known for dataset in self.datasets)

    @property
    def num_prompts(self) -> int:
        return sum(dataset.num_prompts for dataset in self.datasets)

    @property
    def prompt_tokens(self) -> int:
        return sum(dataset.prompt_tokens for dataset in self.datasets)

    @property
    def response_tokens(self) -> int:
        return sum(dataset.response_tokens for dataset in self.datasets)

    @property
    def cap_tokens(self) -> int:
        return sum(dataset.cap_tokens for dataset in self.datasets)

    @property
    def basis(self) -> str:
        """Where the numbers come from, each basis once."""
        return "; ".join(dict.fromkeys(dataset.basis for dataset in self.datasets))

    def scaled(self, share: float, *, caps: float = 1.0) -> Volumes:
        """The account of `share` of every dataset, each reply at most `caps` of its cap."""
        datasets = [
            item.model_copy(
                update={
                    "num_prompts": round(item.num_prompts * share),
                    "prompt_tokens": round(item.prompt_tokens * share),
                    "response_tokens": round(min(item.response_tokens, caps * item.cap_tokens) * share),
                    "cap_tokens": round(item.cap_tokens * share * caps),
                }
            )
            for item in self.datasets
        ]
        lost = self.response_tokens - sum(item.response_tokens for item in datasets) / share
        return self.model_copy(update={"datasets": datasets, "merged_tokens": round((self.merged_tokens - lost) * share)})


def volumes(run: RunFolder, config: RunConfig) -> Volumes:
    """The account of `run` as it stands now; a folder that does not exist yet gives the config's own."""
    progress = {message.name: message for message in read_progress(run.progress, "generate")}
    datasets = [_dataset(run, config, dataset, progress.get(dataset.name)) for dataset in config.prompts.datasets]
    tokens = _parquet_values(run.merged / "tokens.parquet", "input_ids") if _manifest(run.merged) else None
    if tokens is None:
        tokens = sum(
            min(item.prompt_tokens + item.response_tokens, item.num_prompts * config.merging.max_tokens) for item in datasets
        )
    return Volumes(datasets=datasets, merged_tokens=tokens, train_share=1.0 - config.prompts.heldout_share)


def _dataset(run: RunFolder, config: RunConfig, dataset: DatasetConfig, progress: ProgressMessage | None) -> DatasetVolume:
    cap = min(dataset.max_new_tokens, config.generation.max_new_tokens or dataset.max_new_tokens)
    prompts = _manifest(run.prompts(dataset.name))
    num_prompts = prompts.counts.done if prompts else round(dataset.quota * config.prompts.subsample)
    prompt_tokens = _parquet_values(run.prompts(dataset.name) / "prompts.parquet", "input_ids") if prompts else None
    if prompt_tokens is None:
        prompt_tokens = num_prompts * ASSUMED_PROMPT_TOKENS
    responses = _manifest(run.responses(dataset.name))
    figures = responses.figures if responses else progress.figures if progress else {}
    replies, tokens = (int(figures.get(key, 0)) for key in ("replies", "tokens"))
    if responses and responses.is_complete:
        mean, basis = tokens / max(1, replies), "counted from the replies"
    elif replies >= _MIN_REPLIES:
        estimate = figures.get("forecast_tokens_mean")  # corrected for the long replies that are still on their way
        mean = float(estimate) if isinstance(estimate, (int, float)) else tokens / replies
        basis = f"replies so far ({replies:,} in {dataset.name})"
    else:
        mean = float(min(cap, ASSUMED_RESPONSE_TOKENS))
        basis = f"assumed: {ASSUMED_RESPONSE_TOKENS:,} tokens a reply, or the cap where it is lower"
    if prompts is None:
        basis = f"assumed: each source fills its quota, {ASSUMED_PROMPT_TOKENS} tokens a prompt; {basis.removeprefix('assumed: ')}"
    is_known = bool(prompts or dataset.quota)
    if not is_known:
        basis = f"{dataset.name} has no quota: unknown before phase 1"
    wanted = responses.counts.done if responses and responses.is_complete else num_prompts
    return DatasetVolume(
        dataset=dataset.name,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        response_tokens=round(wanted * mean),
        cap_tokens=num_prompts * cap,
        done_records=responses.counts.done if responses else replies,
        is_counted=bool(responses and responses.is_complete),
        is_known=is_known,
        basis=basis,
    )


def _manifest(folder: Path) -> Manifest | None:
    try:
        return load_manifest(folder)
    except ArtifactError:
        return None


def _parquet_values(path: Path, column: str) -> int | None:
    """Number of values in a list column, from the file's footer alone; None where the file cannot be read."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, ValueError):  # pyarrow's own errors are ValueErrors
        return None
    total = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            if chunk.path_in_schema.split(".")[0] == column:
                total += chunk.num_values
    return total
