"""The tensors of a model folder that somebody else wrote: safetensors, whole or sharded, or PyTorch's own files.

`*.bin` and `*.pt` are pickles. They are read by torch's restricted unpickler alone (`weights_only=True`:
tensors and plain containers, no code), only where the folder has no safetensors, and that is said.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.errors import ArtifactError, ConfigError

INDEX_SUFFIX = ".index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors, by name; those of an index must all be there. Raises `ConfigError`, `ArtifactError`."""
    for pattern in ("*.safetensors", "pytorch_model*.bin", "model*.pt"):
        found = sorted(folder.glob(pattern))
        for index in sorted(folder.glob(f"{pattern}{INDEX_SUFFIX}")):
            missing = sorted(set(_weight_map(index).values()) - {path.name for path in found})
            if missing:
                raise ArtifactError(f"{index} names {', '.join(missing)}, which is missing; fetch the draft again")
        if found:
            return found
    raise ConfigError(f"{folder} holds no *.safetensors and no pytorch_model*.bin; give the folder of a draft's weights")


def read_weights(folder: Path, notes: list[str]) -> dict[str, torch.Tensor]:
    """Every tensor of the folder by its name in the file; a name in two files is refused."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        is_pickle = path.suffix != ".safetensors"
        found = _unpickled(path) if is_pickle else _safe(path)
        doubles = sorted(set(found) & set(tensors))
        if doubles:
            raise ArtifactError(f"{path} holds {', '.join(doubles)} for the second time; remove the files of another checkpoint")
        tensors |= found
        if is_pickle:
            notes.append(f"{path.name} is a pickle, read by torch's restricted unpickler; prefer safetensors")
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        missing = sorted(set(_weight_map(index)) - set(tensors))
        if missing:
            raise ArtifactError(f"{index} names {', '.join(missing)}, which no file holds; fetch the draft again")
    return tensors


def _safe(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} is not safetensors ({error}); fetch the draft again") from error


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ArtifactError(
            f"{path} is a pickle that holds more than tensors, or is damaged ({' '.join(str(error).split())[:200]}); it was not "
            "run. Convert it to safetensors where you trust it"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ArtifactError(f"{path} holds a {type(found).__name__}, wanted tensors by name")
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index} is no index of weights ({error!r}); fetch the draft again") from error
