"""The target's own tokenizer, loaded from its folder and nowhere else.

Code of a model folder is executed only where the config names every file of it with its SHA-256; a
tokenizer that would need more is refused rather than replaced by a library class, which would render
other ids without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eyas.errors import ConfigError
from eyas.files import digest_file, read_json
from eyas.target.spec import TargetSpec, check_remote_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(spec: TargetSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of `spec.folder`; raises `ConfigError` if it cannot be loaded, runs code not permitted, or cannot chat."""
    from transformers import AutoTokenizer

    module = _remote_module(spec.folder)
    if module is not None:
        _require_permission(module, spec)
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.folder, local_files_only=True, trust_remote_code=module is not None)
    except Exception as error:  # whatever a tokenizer's file or code raises, the folder is what is wrong
        raise ConfigError(f"the tokenizer of target {spec.folder} cannot be loaded: {error}; fetch its files again") from error
    if not getattr(tokenizer, "chat_template", None) and module is None:
        raise ConfigError(
            f"target {spec.folder} has no chat template (chat_template.jinja or tokenizer_config.json); "
            "choose an instruction-tuned target, or add its template to the folder"
        )
    return tokenizer


def _remote_module(folder: Path) -> Path | None:
    """The Python file that the tokenizer's own config asks for, or None."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    auto_map = read_json(path).get("auto_map") or {}
    reference = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    if isinstance(reference, (list, tuple)):
        reference = next((item for item in reversed(reference) if item), None)
    if not reference:
        return None
    if "--" in reference:
        raise ConfigError(f"{path} asks for code of another repository ({reference!r}); copy it into the folder and name it there")
    return folder / f"{reference.split('.')[0]}.py"


def _require_permission(module: Path, spec: TargetSpec) -> None:
    from transformers.dynamic_module_utils import get_relative_import_files

    if not module.is_file():
        raise ConfigError(f"the tokenizer of target {spec.folder} needs {module.name}, which is missing; fetch the folder again")
    check_remote_code(spec.folder, spec.remote_code_sha256)
    needed = [module, *(Path(name) for name in get_relative_import_files(module))]
    missing = {path.name: digest_file(path) for path in needed if path.name not in spec.remote_code_sha256}
    if missing:
        raise ConfigError(
            f"the tokenizer of target {spec.folder} runs code that is not permitted; read these files, then set "
            f"target.remote_code_sha256 to permit them: {missing}"
        )
