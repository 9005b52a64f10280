"""The config tree: one validated model for a whole run, composed of what each stage owns.

YAML (or a UI form) → `RunConfig` → arguments. Unknown keys are refused with their full path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from eyas.draft.config import DraftConfig
from eyas.errors import ConfigError
from eyas.generation.config import GenerationConfig
from eyas.hidden.config import HiddenConfig
from eyas.merging.config import MergingConfig
from eyas.operate.config import OperateConfig
from eyas.prompts.config import PromptsConfig
from eyas.settings import Settings
from eyas.sglang.config import ServerConfig
from eyas.speculate.config import BenchmarkConfig
from eyas.target.config import TargetConfig


class RunConfig(Settings):
    """Everything that one run needs to know."""

    name: str = Field(default="run", description="Name of the run, for reports and dashboards.")
    target: TargetConfig = TargetConfig()
    server: ServerConfig = ServerConfig()
    prompts: PromptsConfig = PromptsConfig()
    generation: GenerationConfig = GenerationConfig()
    merging: MergingConfig = MergingConfig()
    hidden: HiddenConfig = HiddenConfig()
    draft: DraftConfig = DraftConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    operate: OperateConfig = OperateConfig()


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file and apply `key.sub=value` overrides (values are YAML); raises `ConfigError`."""
    try:
        raw = _read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read ({error.strerror}); give an existing file with --config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds a {type(raw).__name__}, wanted a mapping of sections")
    for override in overrides or []:
        apply_override(raw, override)
    return parse_config(raw, where=str(path))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in a raw config tree; list items are named by number."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not key=value; for instance --set generation.seed=1")
    try:
        value = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML; quote it") from error
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        node = _child(node, part, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"--set {override!r}: the key goes below a single value; --help lists the sections")


def parse_config(raw: dict[str, Any], *, where: str) -> RunConfig:
    """Validate a raw tree; the `ConfigError` names every wrong key, the value seen and what is wanted."""
    try:
        json.dumps(raw, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"config {where}: a value holds {error.object[error.start]!r}, which is no text; remove it") from error
    except (TypeError, ValueError, RecursionError) as error:  # a key that is a date, an anchor inside itself
        raise ConfigError(f"config {where} is no tree of names and values ({error}); write it without this") from error
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_describe(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"config {where}: " + "; ".join(lines)) from error


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: the later one would silently replace the earlier."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        marks: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in marks:
                    raise yaml.MarkedYAMLError(
                        "the same key stands above", marks[key.value], f"key {key.value!r} stands twice", key.start_mark
                    )
                marks[key.value] = key.start_mark
        return node


def _read_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override!r}: {part!r} goes below a single value")
    return node.setdefault(part, {})


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"--set {override!r}: {part!r} is not an index below {len(node)}")
    return int(part)


def _describe(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    return f"{key}: {item['msg']}, got {item['input']!r:.200}"
