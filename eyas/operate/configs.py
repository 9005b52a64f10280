"""Which config a command has: a file, a preset that is installed with Eyas, or what the run recorded."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from eyas.config import RunConfig, apply_override, load_config, parse_config
from eyas.errors import ConfigError
from eyas.files import read_json
from eyas.workspace import RunFolder


def read_config(options: argparse.Namespace) -> RunConfig:
    """The config that the options name, or the one that the run recorded; named after the run folder unless it has a name."""
    if options.config is not None:
        config = load_config(find_config(options.config), options.set)
    else:
        from eyas.operate.status import damaged_run

        source = recorded_config(options.run)
        raw = read_json(source)
        if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
            raise damaged_run(RunFolder(options.run))
        raw = raw["config"]
        for setting in options.set:
            apply_override(raw, setting)
        config = parse_config(raw, where=str(source))
    if "name" not in config.model_fields_set:
        config = config.model_copy(update={"name": options.run.resolve().name})
    return config


def find_config(path: Path) -> Path:
    """The file itself, or the preset of that name that is installed with Eyas: `local-smollm2-quick`."""
    if path.exists() or path.suffix in (".yaml", ".yml", ".json") or len(path.parts) != 1:
        return path
    presets = presets_by_name()
    if path.name not in presets:
        raise ConfigError(f"config {path} is neither a file nor a preset; presets are {', '.join(presets)}")
    return presets[path.name]


def presets_by_name() -> dict[str, Path]:
    """Run configs that are installed with Eyas, beside the deployments that are made of them."""
    found = importlib.util.find_spec("deployments")
    folders = [Path(folder) / "presets" for folder in (found.submodule_search_locations or [])] if found else []
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def recorded_config(run: Path) -> Path:
    """The file in which the run keeps its config; raises `ConfigError` if there is no run yet."""
    source = RunFolder(run).run_json
    if not source.is_file():
        raise ConfigError(f"{run} holds no run yet and no --config is given; name one, for instance --config local-smollm2-quick")
    return source
