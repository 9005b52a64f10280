"""The three tensors of the target that a draft needs: embeddings, final norm and lm_head.

They are found by name through the safetensors index (or the heads of the files) and read alone, so a
target of 1 TB costs the memory of its vocabulary only. Nothing else of the target is opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import ConfigError
from eyas.target.spec import TargetSpec

_EMBED = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.")
_HEAD_PREFIXES = ("", "language_model.", "model.")
_OFFSET_NORMS = ("gemma",)


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """Frozen tensors of the target; `lm_head` is `embed_tokens` itself where the target ties them."""

    embed_tokens: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H], the factor that multiplies the normalised state
    lm_head: torch.Tensor  # [V, H]


def load_head(spec: TargetSpec, dtype: torch.dtype) -> TargetHead:
    """Read embeddings, final norm and lm_head of `spec` as `dtype`.

    Raises `ConfigError` where one is missing, quantised, wrongly shaped or not finite.
    """
    locations = tensor_locations(spec.folder)
    prefix = next((item for item in _PREFIXES if item + _EMBED in locations), None)
    if prefix is None:
        raise ConfigError(f"target {spec.folder} has no tensor *{_EMBED} under {', '.join(_PREFIXES)}; its layout is not supported")
    vocabulary = (spec.vocab_size, spec.hidden_size)
    embed = read_tensor(locations, prefix + _EMBED, vocabulary).to(dtype)
    norm = read_tensor(locations, prefix + "norm.weight", (spec.hidden_size,)).to(dtype)
    if spec.model_type.startswith(_OFFSET_NORMS):
        norm = norm + 1  # Gemma stores the factor minus one
    name = next((item + _HEAD for item in _HEAD_PREFIXES if item + _HEAD in locations), None)
    if name is None and not spec.tie_word_embeddings:
        raise ConfigError(f"target {spec.folder} has no {_HEAD} and does not tie its embeddings; fetch the model folder again")
    lm_head = embed if spec.tie_word_embeddings or name is None else read_tensor(locations, name, vocabulary).to(dtype)
    return TargetHead(embed_tokens=embed, norm=norm, lm_head=lm_head)


def tensor_locations(folder: Path) -> dict[str, Path]:
    """Which file of a model folder holds each tensor, by its index, or by the files' own heads where there is none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is no safetensors index ({error!r}); fetch the model folder again") from error
    locations: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                locations.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"target file {path} is not safetensors ({error}); fetch the model folder again") from error
    return locations


def read_tensor(locations: dict[str, Path], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read one floating tensor of a model folder; raises `ConfigError` naming the tensor and its file."""
    if name not in locations:
        raise ConfigError(f"target has no tensor {name!r}; fetch the model folder again")
    path = locations[name]
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"target file {path} cannot give {name!r} ({error}); fetch the model folder again") from error
    if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ConfigError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, wanted unquantised {list(shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"{path}: {name} holds values that are not finite; fetch the model folder again")
    return tensor
