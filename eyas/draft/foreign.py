"""Reads an EAGLE-3 draft that somebody else has trained, strictly, into our own spec and tensors.

Known layouts: SafeAILab EAGLE-3, SpecForge, TorchSpec (converted to Hugging Face files) and SGLang name the
layer `midlayer.` and count aux layers by *output of block* in `eagle_config`; speculators and vLLM name it
`layers.0.` and count by *input to layer* in a top-level key; speculators nests the shape in
`transformer_layer_config`. Whatever cannot be read as exactly this draft is refused by name: nothing is
guessed silently, and what was decided is said in `notes`. Embeddings must be the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.draft.corpus import check_map
from eyas.draft.spec import NUM_AUX, DraftSpec
from eyas.draft.weight_files import read_weights, weight_files
from eyas.errors import ArtifactError, ConfigError
from eyas.files import digest_file, digest_json, read_json
from eyas.target.spec import TargetSpec

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBED_ROWS = 4096
_PREFIXES = ("module.", "draft_model.", "model.")
_ALIASES = {"draft_id_to_target_id": "d2t"}
_LEFT_OUT = ("rotary_emb.", "verifier_norm.", "verifier_lm_head.", "target_model.")
"""Tensors that draft trainers save beside the draft: derived, or the target's own."""
_VARIANTS = {
    "norm_before_fc": "a norm over the joined aux states",
    "fc_norm": "a norm over each aux state",
    "use_aux_norm": "a norm over each aux state",
    "norm_output": "handing the normed state to the next step",
    "attention_bias": "biases in attention",
    "mlp_bias": "biases in the MLP",
    "bias": "a bias of fc",
    "use_moe": "experts",
    "kv_lora_rank": "latent attention (MLA)",
    "n_routed_experts": "experts",
}
"""Keys that, when set, change what the draft computes in a way that ours does not."""


@dataclass(frozen=True, kw_only=True)
class ForeignDraft:
    """A draft as it was found: what it computes, its tensors by our names (`d2t`, `t2d` included) and how it was read."""

    folder: Path
    layout: str
    spec: DraftSpec
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]


def draft_identity(folder: Path) -> str:
    """Digest of the files that `read_draft` reads; raises `ConfigError` where there is no draft."""
    paths = [_config_path(folder), *weight_files(folder)]
    return digest_json({path.name: digest_file(path) for path in paths})


def read_draft(folder: Path, target: TargetSpec, embed_tokens: torch.Tensor) -> ForeignDraft:
    """Read the draft in `folder` for `target`, whose embeddings are `embed_tokens` [V, H].

    Raises `ConfigError` where there is no draft, `ArtifactError` naming every key or tensor that is missing,
    extra, wrongly shaped, not finite, all zero, or of a draft that computes something else.
    """
    outer = read_json(_config_path(folder))
    if not isinstance(outer, dict):
        raise ArtifactError(f"{folder / 'config.json'} holds a {type(outer).__name__}, wanted an object")
    notes: list[str] = []
    weights = read_weights(folder, notes)
    layout = _layout(outer, weights)
    tensors = _our_names(weights, folder)
    embedding = tensors.pop("embed_tokens.weight", None)
    spec = _spec(outer, layout, tensors, target, folder, notes)
    tensors |= _map(tensors, spec, folder, notes)
    _check(spec, tensors, folder)
    if embedding is not None:
        _check_embedding(embedding, embed_tokens, folder)
    return ForeignDraft(folder=folder, layout=layout, spec=spec, tensors=tensors, notes=tuple(notes))


def _config_path(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        hint = ""
        if list(folder.glob("**/*.distcp")):
            hint = " (it holds distributed-checkpoint shards: convert them first, TorchSpec with its convert_to_hf.py)"
        raise ConfigError(f"{folder} is no draft: it has no config.json{hint}; give the folder of a draft in Hugging Face files")
    return path


def _layout(outer: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str:
    if "speculators_model_type" in outer:
        return "speculators"
    return "vllm" if any("layers.0." in name for name in weights) else "sglang"


def _our_names(weights: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors by the names of our export; what belongs to the trainer or the target is left out."""
    named: dict[str, torch.Tensor] = {}
    for source, tensor in weights.items():
        name = source
        while (prefix := next((item for item in _PREFIXES if name.startswith(item)), None)) is not None:
            name = name.removeprefix(prefix)
        if any(part in name for part in _LEFT_OUT):
            continue
        name = _ALIASES.get(name, name)
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name in named:
            raise ArtifactError(f"draft {folder}: {source} is a second {name}; it mixes two checkpoints, export it again")
        named[name] = tensor
    return named


# config


def _spec(
    outer: Mapping[str, Any],
    layout: str,
    tensors: Mapping[str, torch.Tensor],
    target: TargetSpec,
    folder: Path,
    notes: list[str],
) -> DraftSpec:
    where = folder / "config.json"
    if layout == "speculators" and outer["speculators_model_type"] != "eagle3":
        raise ArtifactError(f"{where}: speculators_model_type is {outer['speculators_model_type']!r}, wanted 'eagle3'")
    inner = outer.get("transformer_layer_config") if layout == "speculators" else outer
    if not isinstance(inner, Mapping):
        raise ArtifactError(f"{where} lacks transformer_layer_config; this is no draft of speculators")
    nested = outer.get("eagle_config")
    eagle: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    merged = {**inner, **outer, **eagle}
    faults = [f"{key} is set: the draft has {what}, ours has not" for key, what in _VARIANTS.items() if merged.get(key)]
    hidden_size = _integer(inner, "hidden_size", where)
    wanted = {
        "hidden_size": (hidden_size, target.hidden_size),
        "target_hidden_size": (outer.get("target_hidden_size") or hidden_size, target.hidden_size),
        "vocab_size": (_integer(inner, "vocab_size", where), target.vocab_size),
        "num_hidden_layers": (inner.get("num_hidden_layers", 1), 1),
        "hidden_act": (inner.get("hidden_act", "silu"), "silu"),
    }
    faults += [f"{key} is {seen}, wanted {value}" for key, (seen, value) in wanted.items() if seen != value]
    if faults:
        raise ArtifactError(f"{where}: {'; '.join(faults)}; this draft is of another target or of another kind")
    if layout == "speculators" and "norm_before_residual" not in outer:
        raise ArtifactError(f"{where} lacks norm_before_residual, which vLLM and speculators read with opposite defaults; add it")
    num_heads = _integer(inner, "num_attention_heads", where)
    theta, scaling = _rope(inner, where, target, notes)
    head = tensors.get("lm_head.weight")
    rows = len(head) if head is not None and head.dim() == 2 else 0
    draft_vocab_size = outer.get("draft_vocab_size") or inner.get("draft_vocab_size") or rows or target.vocab_size
    spec = DraftSpec(
        hidden_size=hidden_size,
        intermediate_size=_integer(inner, "intermediate_size", where),
        num_heads=num_heads,
        num_kv_heads=int(inner.get("num_key_value_heads") or num_heads),
        head_dim=int(inner.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(inner.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        context_length=int(inner.get("max_position_embeddings") or target.context_length),
        vocab_size=target.vocab_size,
        draft_vocab_size=int(draft_vocab_size),
        aux_blocks=_aux_blocks(outer, eagle, target, where, notes),
        eos_token_ids=tuple(target.eos_token_ids),
        norm_before_residual=bool(outer.get("norm_before_residual", False)),
    )
    if spec.norm_before_residual:
        notes.append("norm_before_residual is set: vLLM serves this draft as it was trained, SGLang 0.5.23 ignores the key")
    spec.check()
    return spec


def _aux_blocks(
    outer: Mapping[str, Any], eagle: Mapping[str, Any], target: TargetSpec, where: Path, notes: list[str]
) -> tuple[int, int, int]:
    """The target blocks that the draft reads; they must be those of our states, in one convention or the other."""
    outputs = list(target.aux_blocks)
    inputs = [block + 1 for block in outputs]
    found = {f"eagle_config.{LAYER_IDS}": (eagle.get(LAYER_IDS), outputs), LAYER_IDS: (outer.get(LAYER_IDS), inputs)}
    stated = {key: value for key, value in found.items() if value[0]}
    if not stated:
        notes.append(f"no {LAYER_IDS}: engines take outputs of blocks {outputs}, and so do we")
    for key, (seen, wanted) in stated.items():
        if seen == wanted:
            continue
        if seen not in (outputs, inputs):
            raise ArtifactError(
                f"{where}: {key} is {seen}, wanted {wanted} (outputs of blocks {outputs}): the draft reads other layers of the "
                "target than the stored states hold"
            )
        notes.append(f"{key} is {seen}, the other engine's count of {wanted}: an engine that reads this key takes wrong layers")
    return target.aux_blocks


def _rope(inner: Mapping[str, Any], where: Path, target: TargetSpec, notes: list[str]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling of either spelling; a scaling names its type as `rope_type`, None is the plain rope."""
    parameters = inner.get("rope_parameters")
    scaling = dict(parameters or inner.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or inner.get("rope_theta")
    if theta is None:
        theta = 10_000.0
        notes.append("no rope_theta: the Llama default of 10,000, as engines read it")
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    if isinstance(parameters, Mapping) and inner.get("rope_theta") not in (None, theta):
        raise ArtifactError(
            f"{where}: rope_theta is {inner['rope_theta']}, rope_parameters says {theta}; engines differ in which counts"
        )
    if theta != target.rope["theta"]:
        notes.append(f"rope_theta is {theta:g}, the target's is {target.rope['theta']:g}")
    return float(theta), None if scaling["rope_type"] == "default" else scaling


def _integer(config: Mapping[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArtifactError(f"{where}: {key} is {value!r}, wanted a positive integer; this is no config of an EAGLE-3 draft")
    return value


# tensors


def _map(tensors: dict[str, torch.Tensor], spec: DraftSpec, folder: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    """`d2t` [D] int64 offsets and `t2d` [V] bool with ascending ids; rows of lm_head are sorted with them."""
    D, V = spec.draft_vocab_size, spec.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and D != V:
        raise ArtifactError(
            f"draft {folder}: d2t is missing, and {D} draft ids are no whole vocabulary of {V}; nobody can map them"
        )
    if d2t is None:
        d2t = torch.zeros(D, dtype=torch.int64)
    if tuple(d2t.shape) != (D,) or d2t.is_floating_point():
        raise ArtifactError(f"draft {folder}: d2t is {d2t.dtype} {list(d2t.shape)}, wanted whole numbers [{D}]")
    if t2d is not None and tuple(t2d.shape) != (V,):
        raise ArtifactError(f"draft {folder}: t2d is {list(t2d.shape)}, wanted [{V}]")
    member = None if t2d is None else t2d.bool().nonzero()[:, 0]
    if member is not None and len(member) == V != D:
        raise ArtifactError(f"draft {folder}: t2d keeps all {V} ids for a draft vocabulary of {D}: its map was never filled")
    ids = _target_ids(d2t.long(), member, V, folder, notes)
    order = ids.argsort()
    if not torch.equal(order, torch.arange(D)):
        notes.append("the map is not ascending: its ids and the rows of lm_head were sorted together")
        head = tensors.get("lm_head.weight")
        if head is not None and len(head) == D:
            tensors["lm_head.weight"] = head[order].contiguous()
        ids = ids[order]
    kept = torch.zeros(V, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(D), "t2d": kept}


def _target_ids(d2t: torch.Tensor, member: torch.Tensor | None, vocab_size: int, folder: Path, notes: list[str]) -> torch.Tensor:
    """Target ids [D] of the draft ids: `d2t` holds offsets, as every engine adds them, or, where t2d proves it, ids."""

    def is_possible(ids: torch.Tensor) -> bool:
        in_range = bool((ids >= 0).all()) and bool((ids < vocab_size).all())
        found = ids.sort().values
        return in_range and bool((found[1:] > found[:-1]).all()) and (member is None or torch.equal(found, member))

    as_offsets = torch.arange(len(d2t)) + d2t
    if is_possible(as_offsets):
        if member is None and d2t.any() and is_possible(d2t):
            notes.append("d2t was read as offsets, as engines do; without t2d it could also be ids (eyas diagnose tells)")
        return as_offsets
    if is_possible(d2t):
        notes.append("d2t holds ids, not offsets: engines add it to the draft id and would propose other tokens")
        return d2t
    raise ArtifactError(
        f"draft {folder}: d2t maps to ids outside 0 to {vocab_size - 1}, twice to the same one, or to others than t2d keeps; "
        "the map belongs to another draft"
    )


def _check(spec: DraftSpec, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    wanted = spec.tensor_shapes
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is not expected" for name in tensors if name not in wanted and name not in ("d2t", "t2d")]
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            hint = ""
            if name == "fc.weight" and tuple(tensor.shape) == (spec.hidden_size, 2 * spec.hidden_size):
                hint = f" (two inputs: a draft of EAGLE-1 or -2, not {NUM_AUX} aux states)"
            faults.append(f"{name} is {list(tensor.shape)}, wanted {list(shape)}{hint}")
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            faults.append(f"{name} is {tensor.dtype}, wanted unquantised floating point")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} is not finite")
        elif not bool(tensor.any()):
            faults.append(f"{name} is all zero")
    if faults:
        raise ArtifactError(f"draft {folder}: {'; '.join(faults)}")
    check_map(tensors["d2t"], tensors["t2d"], str(folder))


def _check_embedding(seen: torch.Tensor, wanted: torch.Tensor, folder: Path) -> None:
    """Own embeddings must be the target's: SGLang replaces them by the target's, vLLM does not (TorchSpec#38)."""
    if seen.shape != wanted.shape:
        raise ArtifactError(f"draft {folder}: embed_tokens.weight is {list(seen.shape)}, the target's is {list(wanted.shape)}")
    worst, power = 0.0, 0.0
    for part, ours in zip(torch.split(seen, EMBED_ROWS), torch.split(wanted, EMBED_ROWS), strict=True):
        worst += float((part.float() - ours.float()).square().sum())
        power += float(ours.float().square().sum())
    error = (worst / max(power, 1e-30)) ** 0.5
    if not error < 0.02:
        raise ArtifactError(
            f"draft {folder}: embed_tokens.weight differs from the target's by {error:.1%} (relative), wanted below 2 %: SGLang "
            "would serve it with the target's, vLLM with its own; it was trained for another target, or saved unloaded"
        )
