"""The model card of an exported draft: what it is, what it was trained on, what it measured, how to serve it."""

from __future__ import annotations

from eyas.draft.spec import DraftSpec
from eyas.manifest import Manifest
from eyas.target.spec import TargetSpec

_LIMIT = "The residual is the normed state (`norm_before_residual`): vLLM serves it so, SGLang 0.5.23 ignores the key.\n"


def model_card(target: TargetSpec, spec: DraftSpec, trained: Manifest, licenses: dict[str, str]) -> str:
    """Markdown with a YAML head; `licenses` maps each training dataset to its licence note ("" for none stated)."""
    figures = trained.figures
    data = (
        "\n".join(f"- {name}: {license_ or 'no licence stated'}" for name, license_ in sorted(licenses.items())) or "- not stated"
    )
    low, middle, high = spec.aux_blocks
    limit = _LIMIT if spec.norm_before_residual else ""
    return f"""---
library_name: eagle3
tags: [speculative-decoding, eagle3]
---
# EAGLE-3 draft for {target.folder.name}

One decoder layer, {spec.num_parameters / 1e6:.1f} M parameters in bf16, hidden size {spec.hidden_size}, draft vocabulary \
{spec.draft_vocab_size} of {spec.vocab_size}.
It reads the target's states after blocks {low}, {middle} and {high} and the target's own embeddings, which are not in this folder.
It is for this target alone: architecture `{target.architecture}`, fingerprint `{target.fingerprint[:16]}`.

## Training
- {trained.counts.done} replies of the target itself; {figures.get("steps", "?")} steps over \
{figures.get("positions", "?")} positions.
- Predicted accept length at temperature 0 on held-out replies, bonus token included, chain of \
{trained.config.get("num_draft_tokens", "?")}: **{figures.get("accept_length", "?")}**.

## Data
{data}

## Serving
{limit}SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 \
--speculative-eagle-topk 1 --speculative-num-draft-tokens 4`
vLLM: `speculative_config={{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}}`

## Licence
The draft is derived from the target's outputs and weights; the target's licence and those of the data above apply.
"""
