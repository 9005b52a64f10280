"""The model card of an exported draft: what it is, what it was trained on, what it measured, how to serve it, its licence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.draft.spec import DraftSpec
from eyas.manifest import Manifest
from eyas.target.spec import TargetSpec

_LIMIT = "The residual is the normed state (`norm_before_residual`): vLLM serves it so, SGLang 0.5.23 ignores the key.\n"


@dataclass(frozen=True, kw_only=True)
class DatasetNote:
    """One training dataset: where its prompts come from and under which licence ("" for none stated), and what was used."""

    name: str
    source: str
    license: str
    replies: int | None
    tokens: int | None
    """Tokens of those replies with their prompts; None, as `replies`, where the merge does not say."""


def model_card(
    target: TargetSpec,
    spec: DraftSpec,
    trained: Manifest,
    data: Sequence[DatasetNote],
    replay: Mapping[str, Any],
    coverage: Mapping[str, float],
) -> str:
    """Markdown with a YAML head; `replay` is the held-out replay that chose the checkpoint, `coverage` the vocabulary's share."""
    low, middle, high = spec.aux_blocks
    k = int(trained.config["num_draft_tokens"])
    figures = trained.figures
    kept = "; ".join(f"{share:.1%} of the {split} tokens" for split, share in sorted(coverage.items()))
    raw = f" ({replay['accepted']:,} accepted in {replay['verifications']:,} verifications)" if replay else ""
    license_ = license_of(target.folder)
    return f"""---
library_name: eagle3
license: other
tags: [speculative-decoding, eagle3]
---
# EAGLE-3 draft for {target.folder.name}

One decoder layer, {spec.num_parameters / 1e6:.1f} M parameters in bf16, hidden size {spec.hidden_size}, draft vocabulary \
{spec.draft_vocab_size} of {spec.vocab_size}{f" ({kept})" if kept else ""}.
It reads the target's states after blocks {low}, {middle} and {high} and the target's own embeddings, which are not in this folder.
It is for this target alone: architecture `{target.architecture}`, fingerprint `{target.fingerprint[:16]}`.

## Training
{trained.counts.done:,} replies of the target itself; {figures["steps"]:,} steps over {figures["positions"]:,} positions.

## Figures
Accept length at temperature 0, replayed on held-out replies with {k} drafts per verification, bonus token included: \
**{figures["accept_length"]:.3f}**{raw}.
{_per_dataset(replay)}
## Data
{_data(data)}

## Serving
{_LIMIT if spec.norm_before_residual else ""}SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path \
THIS_FOLDER --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}`
vLLM: `speculative_config={{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": {k}}}`

## Licence
The draft is derived from the target's outputs and weights: the target's licence ({license_ or "not stated in its folder"}) and \
those of the data above apply.
"""


def license_of(folder: Path) -> str:
    """What the head of a model folder's README states as licence; "" where there is none."""
    try:
        _, head, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        values = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    if not isinstance(values, dict):
        return ""
    name = values.get("license")
    return str((values.get("license_name") or name) if name == "other" else name or "")


def _per_dataset(replay: Mapping[str, Any]) -> str:
    per_dataset = replay.get("per_dataset") or {}
    if not per_dataset:
        return ""
    lines = ["", "| held-out replies of | accept length | verifications |", "|---|---|---|"]
    lines += [f"| {name} | {item['accept_length']:.3f} | {item['verifications']:,} |" for name, item in sorted(per_dataset.items())]
    return "\n".join(lines) + "\n"


def _data(data: Sequence[DatasetNote]) -> str:
    lines = ["| dataset | prompts from | licence | replies | tokens |", "|---|---|---|---|---|"]
    for note in data:
        used = [f"{value:,}" if value is not None else "–" for value in (note.replies, note.tokens)]
        lines.append("| " + " | ".join([note.name, f"`{note.source}`", note.license or "none stated", *used]) + " |")
    return "\n".join(lines)
