"""What the rest of Eyas must know of the target, read from the model folder's own files.

Nothing is asked that the folder already says: sizes, layers, end tokens, context and identity come
from `config.json` (nested `text_config` included), `generation_config.json`, the tokenizer's files and
the heads of the weight files. No weight is loaded; on a model of 1 TB the identity reads about 20 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError
from eyas.files import digest_file, digest_json
from eyas.target.config import TargetConfig
from eyas.target.packaged import PACKAGE, packaged_target

MIN_LAYERS = 8
_NESTED_KEYS = ("text_config", "llm_config", "language_config")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """Sizes, end tokens, context and identity of a target; `hidden_size` is H, `vocab_size` V (rows of lm_head)."""

    folder: Path
    model_type: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """`theta` (float) and `scaling` (the config's own dictionary, or None)."""
    tie_word_embeddings: bool
    context_length: int
    eos_token_ids: list[int]
    """Every id that ends a turn: `config.json` and `generation_config.json` together, ascending, as SGLang takes them."""
    dtype: str
    generation_defaults: dict[str, Any]
    """The target's recommended sampling, `generation_config.json` as it stands; {} where there is none."""
    tokenizer_fingerprint: str
    """Digest of the tokenizer's files, its template and its permitted code: all that changes a rendering."""
    fingerprint: str
    """Digest of config, tokenizer, template, weights' identity and revision."""
    remote_code_sha256: dict[str, str] = field(default_factory=dict)

    @property
    def aux_blocks(self) -> tuple[int, int, int]:
        """The three target layers a draft reads (low, middle, high), each named by the *output* of block k (0-based).

        This is the convention's one home. EAGLE's and vLLM's ids name the *input* to a block and are one higher:
        `(2, n//2, n - 3)`; they are the same tensors.
        """
        return (1, self.num_layers // 2 - 1, self.num_layers - 4)


def default_cache() -> Path:
    """Where packaged targets are kept once converted."""
    return Path.home() / ".cache" / "eyas" / "targets"


def load_target(config: TargetConfig, cache: Path | None = None) -> TargetSpec:
    """Read the target that `config` names; a packaged one is converted into `cache` on first use.

    Raises `ConfigError` where the folder, a file or a needed key is missing, where the model has fewer
    than eight layers, or where a named Python file differs from its hash.
    """
    folder = _resolve_folder(config.model, cache or default_cache())
    outer = _read_config(folder / "config.json")
    inner = next((outer[key] for key in _NESTED_KEYS if isinstance(outer.get(key), dict)), outer)
    generation_defaults = _read_config(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    where = folder / "config.json"
    num_layers = _integer(inner, "num_hidden_layers", where)
    if num_layers < MIN_LAYERS:
        raise ConfigError(f"target {folder} has {num_layers} layers, a draft needs at least {MIN_LAYERS}; choose another target")
    hidden_size = _integer(inner, "hidden_size", where)
    num_heads = _integer(inner, "num_attention_heads", where)
    check_remote_code(folder, config.remote_code_sha256)
    tokenizer_fingerprint = _tokenizer_fingerprint(folder, config)
    return TargetSpec(
        folder=folder,
        model_type=str(outer.get("model_type", "")),
        architecture=str((outer.get("architectures") or [""])[0]),
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=_integer(inner, "vocab_size", where),
        num_heads=num_heads,
        num_kv_heads=int(inner.get("num_key_value_heads") or num_heads),
        head_dim=int(inner.get("head_dim") or hidden_size // num_heads),
        intermediate_size=_integer(inner, "intermediate_size", where),
        rms_norm_eps=float(inner.get("rms_norm_eps", 1e-6)),
        rope=_rope(inner),
        tie_word_embeddings=bool(outer.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
        context_length=config.context_length or _integer(inner, "max_position_embeddings", where),
        eos_token_ids=_end_tokens(outer, inner, generation_defaults, where),
        dtype=str(inner.get("dtype") or inner.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype") or "bfloat16"),
        generation_defaults=generation_defaults,
        tokenizer_fingerprint=tokenizer_fingerprint,
        fingerprint=digest_json(
            {
                "config": outer,
                "tokenizer": tokenizer_fingerprint,
                "weights": _weights_identity(folder),
                "revision": config.revision,
            }
        ),
        remote_code_sha256=dict(config.remote_code_sha256),
    )


def check_remote_code(folder: Path, wanted_sha256: dict[str, str]) -> None:
    """Compare every Python file that may be executed with its hash; raises `ConfigError` naming the first that differs."""
    for name, wanted in wanted_sha256.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ConfigError(f"target.remote_code_sha256 names {name!r}, which is no file of {folder}; correct the name")
        seen = digest_file(path)
        if seen != wanted.lower():
            raise ConfigError(
                f"{path} has SHA-256 {seen}, target.remote_code_sha256 says {wanted}; read the file again before you permit it"
            )


def _resolve_folder(model: str, cache: Path) -> Path:
    if model.startswith("package:"):
        if model != f"package:{PACKAGE}":
            raise ConfigError(f"target.model {model!r} is not known; packaged targets: package:{PACKAGE}")
        return packaged_target(cache)
    folder = Path(os.path.expanduser(model))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"target.model {model!r} is no model folder (no config.json in it); give the folder of the served weights"
        )
    return folder.resolve()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"target file {path} cannot be read as JSON ({error}); fetch the model folder again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"target file {path} holds a {type(value).__name__}, wanted an object; fetch the model folder again")
    return value


def _integer(config: dict[str, Any], key: str, where: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {key} is {value!r}, wanted a positive integer; this target's architecture is not supported")
    return value


def _rope(inner: dict[str, Any]) -> dict[str, Any]:
    parameters = inner.get("rope_parameters")  # transformers 5 keeps theta and scaling together, older configs apart
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        is_plain = scaling.get("rope_type", "default") == "default"
        return {"theta": float(parameters["rope_theta"]), "scaling": None if is_plain else scaling}
    return {"theta": float(inner.get("rope_theta", 10_000.0)), "scaling": inner.get("rope_scaling")}


def _end_tokens(outer: dict[str, Any], inner: dict[str, Any], generation: dict[str, Any], where: Path) -> list[int]:
    found: set[int] = set()
    for source in (outer, inner, generation):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if not found:
        raise ConfigError(f"{where} and generation_config.json name no eos_token_id; add the id that ends a turn")
    return sorted(found)


def _tokenizer_fingerprint(folder: Path, config: TargetConfig) -> str:
    names = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    templates = sorted(str(path.relative_to(folder)) for path in folder.glob("additional_chat_templates/*.jinja"))
    files = {name: digest_file(folder / name) for name in [*names, *templates]}
    return digest_json({"files": files, "code": config.remote_code_sha256, "template_kwargs": config.chat_template_kwargs})


def _weights_identity(folder: Path) -> dict[str, str]:
    """Per weight file, a digest of its size, head (names, shapes, offsets) and last 64 KiB: other weights differ there."""
    identity = {}
    for path in sorted(folder.glob("*.safetensors")):
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            digest = hashlib.sha256(str(size_bytes).encode())
            header_bytes = min(int.from_bytes(file.read(8), "little"), 256 * 1024 * 1024)
            digest.update(file.read(min(header_bytes, size_bytes)))
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(file.read())
        identity[path.name] = digest.hexdigest()
    return identity
