"""Export of the best draft: exactly the tensors and keys that SGLang and vLLM read, and a loader that is strict.

Both engines ignore or miss unknown names in their own ways (SGLang silently, leaving random weights), so the
exact set is checked here, when written and when read. Embeddings are absent by intent: both engines take the
target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from eyas.config import RunConfig
from eyas.draft.card import DatasetNote, model_card
from eyas.draft.checkpoint import load_checkpoint, named_checkpoint
from eyas.draft.corpus import check_map, read_map
from eyas.draft.engines import faults_of
from eyas.draft.spec import DraftSpec
from eyas.errors import ArtifactError, ConfigError
from eyas.files import read_json, read_json_lines, write_bytes, write_json
from eyas.manifest import Counts, Manifest, file_entries, fingerprint, finished_manifest, load_manifest, now, verify_manifest
from eyas.progress import Progress, Report, silent
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

VERSION = 2
STAGE = "export"
EXPORT_DTYPE = torch.bfloat16
CONFIG, MODEL, CARD = "config.json", "model.safetensors", "README.md"


def export_draft(run: RunFolder, config: RunConfig, report: Report = silent) -> Manifest:
    """Write the best checkpoint of `run` to `draft/export/` and read it back strictly; returns its manifest.

    Raises `ArtifactError` for a checkpoint with missing, extra, wrongly shaped, not finite or all-zero tensors.
    """
    trained = load_manifest(run.draft)
    data = training_data(run, config)
    settings = {"datasets": {note.name: {"source": note.source, "license": note.license} for note in data}}
    print_ = fingerprint(STAGE, VERSION, inputs={"train": trained.digest()}, config=settings)
    finished = finished_manifest(run.export, print_)
    if finished is not None:
        return finished
    started_at = now()
    target = load_target(config.target)
    d2t, t2d = read_map(run.merged / "vocab_map.safetensors")
    spec = training_spec(run, config, target, len(d2t))
    best = load_checkpoint(named_checkpoint(run.draft / "checkpoints", "best"))
    check_tensors(spec, best.masters | {"d2t": d2t, "t2d": t2d}, str(best.folder), torch.float32)
    tensors = {name: value.to(EXPORT_DTYPE) for name, value in best.masters.items()} | {"d2t": d2t, "t2d": t2d}
    card = model_card(target, spec, trained, data, _best_replay(run, best.state.step), _figures(run.merged).get("coverage", {}))
    (run.export / "manifest.json").unlink(missing_ok=True)
    write_bytes(run.export / MODEL, save(tensors, metadata={"format": "pt"}))
    write_json(run.export / CONFIG, spec.engine_config(str(EXPORT_DTYPE).removeprefix("torch.")))
    write_bytes(run.export / CARD, card.encode())
    load_export(run.export)
    report(Progress(stage=STAGE, done=1, total=1, unit="drafts", is_final=True))
    return Manifest(
        stage=STAGE,
        stage_version=VERSION,
        fingerprint=print_,
        inputs={"train": trained.digest()},
        config=settings,
        counts=Counts.of(done=1),
        files=file_entries(run.export, [CONFIG, MODEL, CARD]),
        figures={"accept_length": trained.figures.get("accept_length"), "step": best.state.step, "parameters": spec.num_parameters},
        started_at=started_at,
    ).write(run.export)


def training_data(run: RunFolder, config: RunConfig) -> list[DatasetNote]:
    """Every dataset of the run with its licence, the config's or the source's own, and what the merge took of it."""
    merged = _figures(run.merged).get("per_dataset", {})
    notes = []
    for dataset in config.prompts.datasets:
        license_ = dataset.license or str(_figures(run.prompts(dataset.name)).get("license", ""))
        used = merged.get(dataset.name, {}).get("train", {})
        notes.append(
            DatasetNote(
                name=dataset.name,
                source=dataset.source,
                license=license_,
                replies=used.get("records"),
                tokens=used.get("tokens"),
            )
        )
    return notes


def _figures(folder: Path) -> dict[str, Any]:
    return load_manifest(folder).figures if (folder / "manifest.json").is_file() else {}


def _best_replay(run: RunFolder, step: int) -> dict[str, Any]:
    """The held-out replay of `step` as training wrote it down; empty where its metrics are gone."""
    path = run.draft / "metrics.jsonl"
    rows = [json.loads(line) for _, line in read_json_lines(path)] if path.is_file() else []
    return next((row for row in reversed(rows) if row.get("kind") == "heldout" and row.get("step") == step), {})


def check_export(run: RunFolder, target: TargetSpec) -> Manifest:
    """The manifest of the exported draft, once its files are as exported and its training was one of `target`.

    Raises `ArtifactError` for a changed file, an export of another training, a draft of another target.
    """
    exported, trained = verify_manifest(run.export), load_manifest(run.draft)
    if exported.inputs.get("train") != trained.digest():
        raise ArtifactError(f"{run.export} was not exported from the training in {run.draft}; export the draft again (eyas train)")
    wanted = target.fingerprint
    if (seen := str(trained.config.get("target", "no target"))) != wanted:
        raise ArtifactError(
            f"{run.export} is a draft of target {seen[:16]}, {target.folder} is {wanted[:16]}: its weights, template or tokenizer "
            "changed since; serve the target of the training, or train the draft again"
        )
    return exported


def training_spec(run: RunFolder, config: RunConfig, target: TargetSpec, draft_vocab_size: int) -> DraftSpec:
    """The shape that this run trains: the baseline's where it starts from that, else the one derived from the target."""
    if not config.draft.warm_start:
        return DraftSpec.from_target(target, config.draft, draft_vocab_size)
    spec, _ = load_export(run.baseline)
    wanted = {"intermediate_size": config.draft.intermediate_size, "num_kv_heads": config.draft.num_kv_heads}
    for name, value in wanted.items():
        if value not in (0, getattr(spec, name)):
            raise ConfigError(f"draft.{name} is {value}, the draft to start from has {getattr(spec, name)}; leave it at 0")
    return spec


def load_export(folder: Path) -> tuple[DraftSpec, dict[str, torch.Tensor]]:
    """Read an exported draft strictly: its spec and its tensors by name (`d2t` and `t2d` included).

    Raises `ArtifactError` naming every key or tensor that is missing, extra, wrongly shaped, not finite or all zero.
    """
    raw = read_json(folder / CONFIG)
    if not isinstance(raw, dict):
        raise ArtifactError(f"{folder / CONFIG} holds a {type(raw).__name__}, wanted an object; export the draft again")
    spec = _spec_of(raw, folder / CONFIG)
    try:
        tensors = load_file(folder / MODEL)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{folder / MODEL} is not safetensors ({error}); export the draft again") from error
    check_tensors(spec, tensors, str(folder / MODEL), getattr(torch, raw["dtype"]))
    return spec, tensors


def check_tensors(spec: DraftSpec, tensors: dict[str, torch.Tensor], where: str, dtype: torch.dtype) -> None:
    """Compare `tensors` with the exact set that `spec` wants, weights in `dtype`; raises `ArtifactError` naming every fault."""
    wanted: dict[str, tuple[int, ...]] = {**spec.tensor_shapes, "d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)}
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is not expected" for name in tensors if name not in wanted]
    for name, tensor in tensors.items():
        if name not in wanted:
            continue
        if tuple(tensor.shape) != wanted[name]:
            faults.append(f"{name} is {list(tensor.shape)}, wanted {list(wanted[name])}")
        elif name not in ("d2t", "t2d"):
            if tensor.dtype != dtype:
                faults.append(f"{name} is {tensor.dtype}, wanted {dtype}")
            elif not bool(torch.isfinite(tensor).all()):
                faults.append(f"{name} is not finite")
            elif not bool(tensor.any()):
                faults.append(f"{name} is all zero")
    if faults:
        raise ArtifactError(f"draft {where}: {'; '.join(faults)}; train or export it again")
    check_map(tensors["d2t"], tensors["t2d"], where)


def _spec_of(raw: dict[str, Any], path: Path) -> DraftSpec:
    """The spec that a `config.json` describes; it must say exactly what this spec would write."""
    try:
        rope = raw["rope_parameters"]
        spec = DraftSpec(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope_scaling=raw["rope_scaling"],
            context_length=raw["max_position_embeddings"],
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw["draft_vocab_size"],
            aux_blocks=tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
            eos_token_ids=tuple(raw["eos_token_id"]),
            norm_before_residual=raw["norm_before_residual"],
        )
        if raw["dtype"] not in ("bfloat16", "float32"):
            raise ArtifactError(f"{path}: dtype is {raw['dtype']!r}, wanted 'bfloat16' or 'float32'; export the draft again")
        wanted = spec.engine_config(raw["dtype"])
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path} lacks or misspells {error}; export the draft again") from error
    faults = [
        f"{key} is {json.dumps(raw.get(key))}, wanted {json.dumps(value)}" for key, value in wanted.items() if raw.get(key) != value
    ]
    faults += [f"{key} is not expected" for key in raw if key not in wanted]
    faults += faults_of(raw, spec.aux_blocks)
    if faults:
        raise ArtifactError(f"{path}: {'; '.join(faults)}; export the draft again")
    spec.check()
    return spec
