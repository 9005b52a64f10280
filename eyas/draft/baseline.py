"""The draft a run is measured against, and may start from: somebody else's, named by `draft.baseline`.

It is imported when the run is opened, long before the first reply, so that a draft that does not fit fails
then: `baseline/` holds it as our own export, with its vocabulary map. With `draft.warm_start` the merge keeps
that map, the training starts from those weights and keeps their shape. Its replay on the held-out replies is
the figure that the trained draft must beat.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from eyas.config import RunConfig
from eyas.draft.corpus import Corpus, read_ahead
from eyas.draft.export import CONFIG, MODEL, load_export
from eyas.draft.foreign import draft_identity, read_draft
from eyas.draft.loss import TargetRows
from eyas.draft.model import Draft
from eyas.draft.replay import ReplayResult, replay
from eyas.draft.spec import DraftSpec
from eyas.errors import ConfigError
from eyas.files import write_bytes, write_json
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, now
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetHead, load_head
from eyas.workspace import RunFolder

logger = logging.getLogger(__name__)

STAGE, VERSION = "baseline", 1


def import_baseline(run: RunFolder, config: RunConfig, target: TargetSpec) -> Manifest | None:
    """Read `draft.baseline` into `baseline/` as our own export; None where the config names no draft.

    Raises `ConfigError` for a folder without a draft, `ArtifactError` for a draft of another target or kind.
    """
    if not config.draft.baseline:
        if config.draft.warm_start:
            raise ConfigError("draft.warm_start is set and draft.baseline is empty; name the folder of the draft to start from")
        return None
    return import_draft(Path(os.path.expanduser(config.draft.baseline)), target, run.baseline)


def import_draft(source: Path, target: TargetSpec, to: Path) -> Manifest:
    """Read the draft in `source` and write it to `to` as our own export; an unchanged one is left alone."""
    print_ = fingerprint(STAGE, VERSION, inputs={"draft": draft_identity(source), "target": target.fingerprint}, config={})
    finished = finished_manifest(to, print_)
    if finished is not None:
        return finished
    started_at = now()
    found = read_draft(source, target, load_head(target, torch.bfloat16).embed_tokens)
    for note in found.notes:
        logger.warning("baseline folder=%s note=%s", source, note)
    floats = {value.dtype for name, value in found.tensors.items() if name not in ("d2t", "t2d")}
    dtype = torch.bfloat16 if floats == {torch.bfloat16} else torch.float32
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.tensors.items()}
    (to / "manifest.json").unlink(missing_ok=True)
    write_bytes(to / MODEL, save({name: value.contiguous() for name, value in tensors.items()}, metadata={"format": "pt"}))
    write_json(to / CONFIG, found.spec.engine_config(str(dtype).removeprefix("torch.")))
    load_export(to)
    return Manifest(
        stage=STAGE,
        stage_version=VERSION,
        fingerprint=print_,
        config={"source": str(source), "layout": found.layout},
        counts=Counts.of(done=1),
        files=file_entries(to, [CONFIG, MODEL]),
        figures={
            "draft_vocab_size": found.spec.draft_vocab_size,
            "parameters": found.spec.num_parameters,
            "notes": list(found.notes),
        },
        started_at=started_at,
    ).write(to)


def starting_weights(run: RunFolder, config: RunConfig, d2t: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The trained tensors to start from, None for a fresh start; `d2t` [D] is the run's map and must be the checkpoint's.

    Raises `ConfigError` where the merged map is another one: each row of the head would mean another token
    (https://github.com/sgl-project/SpecForge/pull/534).
    """
    if not config.draft.warm_start:
        return None
    spec, tensors = load_export(run.baseline)
    if not torch.equal(tensors["d2t"], d2t):
        raise ConfigError(
            f"{run.merged} has another vocabulary map than the draft to start from, so its head rows would mean other tokens; "
            "run the merge again: with draft.warm_start it keeps the checkpoint's map"
        )
    return {name: tensors[name] for name in spec.tensor_shapes}


def replay_baseline(run: RunFolder, config: RunConfig, target: TargetSpec, corpus: Corpus) -> dict[str, Any] | None:
    """Accept length of the baseline on the held-out replies that select checkpoints, pooled and per dataset; None without one."""
    if not config.draft.baseline:
        return None
    spec, tensors = load_export(run.baseline)
    ids = corpus.heldout[: config.draft.eval_records]
    head = load_head(target, torch.float32)
    result = replay_records(make_draft(spec, tensors, head.embed_tokens), tensors["d2t"], head, corpus, ids, config)
    counts = result.overall
    return {
        "accept_length": round(counts.accept_length, 4),
        "verifications": counts.verifications,
        "accepted": counts.accepted,
        "per_dataset": {name: round(item.accept_length, 4) for name, item in sorted(result.per_dataset.items())},
    }


def make_draft(spec: DraftSpec, tensors: Mapping[str, torch.Tensor], embed_tokens: torch.Tensor) -> Draft:
    """A draft in the precision of `embed_tokens` [V, H] with the trained tensors of `tensors`."""
    draft = Draft(spec, embed_tokens, embed_tokens.dtype)
    draft.load_state_dict({name: tensors[name].to(embed_tokens.dtype) for name in spec.tensor_shapes})
    return draft


def replay_records(
    draft: Draft, d2t: torch.Tensor, head: TargetHead, corpus: Corpus, ids: list[str], config: RunConfig
) -> ReplayResult:
    """Replay `draft`, whose map is `d2t` [D], on the records `ids` with the run's chain length."""
    rows = TargetRows.of(head.lm_head, d2t, has_states=corpus.has_states)
    batches = read_ahead(corpus, corpus.pack(ids, config.draft.batch_tokens), config.benchmark.num_draft_tokens)
    return replay(draft, ((batch, rows.argmax(batch.labels, head.lm_head, is_exact=True)) for batch in batches), rows)
