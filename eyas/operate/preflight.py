"""Everything that can be refused before any work starts, each in one clear line.

The checks cost about a second: they read the config, the target's folder, the sources' existence, the
ports and the disk, and ask running servers who they are.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.merging.config import MergingConfig
from eyas.operate.forecast import Forecast, forecast, sizes_of
from eyas.operate.hosts import check_server
from eyas.operate.plan import check_budget, check_disk, free_bytes
from eyas.operate.status import read_status
from eyas.operate.volumes import volumes
from eyas.target.spec import TargetSpec, load_target
from eyas.workspace import RunFolder

_TEMPLATE_ARGUMENTS = {"conversation", "tools", "add_generation_prompt", "tokenize", "return_dict", "continue_final_message"}


def preflight(root: Path, config: RunConfig, *, api_key: str = "") -> Forecast:
    """Raise `ConfigError` for what would fail later; otherwise the forecast of what is left to do.

    Creates nothing but the run folder itself, to prove that it can be written.
    """
    check_files(config)
    check_sources(config)
    spec = load_target(config.target)
    check_target(spec, config)
    check_values(spec, config)
    check_later_phases(spec, config, api_key)
    RunFolder(root).create()
    if config.server.kind == "embedded":
        check_port(config.server.engine.port)
    else:
        for url in config.server.urls:
            check_server(url, config, api_key=api_key)
    outlook = outlook_of(root, config, spec)
    check_budget(outlook, config, spec.hidden_size)
    check_disk(outlook, config, free_bytes(root), str(root))
    return outlook


def outlook_of(root: Path, config: RunConfig, spec: TargetSpec) -> Forecast:
    """The forecast of what is left of the run in `root`, which need not exist."""
    run = RunFolder(root)
    try:
        statuses = {phase.phase: phase for phase in read_status(root).phases}
    except ConfigError:  # no run yet, or a damaged run.json, which is written anew
        statuses = None
    return forecast(config, sizes_of(spec), volumes(run, config), statuses)


def check_files(config: RunConfig) -> None:
    """Every file that the config names exists; raises `ConfigError` naming the key and the file."""
    if not config.prompts.datasets:
        raise ConfigError("prompts.datasets is empty; name at least one dataset, or start from a preset in deployments/presets")
    named = {f"prompts.datasets.{dataset.name}.source": dataset.source for dataset in config.prompts.datasets}
    named |= {f"prompts.decontaminate_against.{n}": source for n, source in enumerate(config.prompts.decontaminate_against)}
    named |= {f"benchmark.sets.{n}": source for n, source in enumerate(config.benchmark.sets)}
    files = {key: source.removeprefix("file:") for key, source in named.items() if source.startswith("file:")}
    if config.server.api_key_file:
        files["server.api_key_file"] = config.server.api_key_file
    paths = {key: Path(os.path.expanduser(name)) for key, name in files.items()}
    if missing := [f"{key}: {path}" for key, path in paths.items() if not path.exists()]:
        relative = "" if all(path.is_absolute() for path in paths.values()) else f" (a relative path begins at {Path.cwd()})"
        raise ConfigError(f"{', '.join(missing)} {'do' if len(missing) > 1 else 'does'} not exist; correct the path{relative}")
    for key, name in files.items():
        path = paths[key]
        if not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{key}: {name} is a device or a pipe, which cannot be read twice; give a file or a folder")


def check_sources(config: RunConfig) -> None:
    """Every dataset's source is of a known kind and, where it is a package's, installed; raises `ConfigError`."""
    from eyas.prompts.benchsets import open_benchmark_set
    from eyas.prompts.packages import open_package_source

    for source in config.prompts.decontaminate_against:
        open_benchmark_set(source)
    for dataset in config.prompts.datasets:
        kind, _, name = dataset.source.partition(":")
        if kind not in ("file", "hub", "package") or not name:
            raise ConfigError(
                f"prompts.datasets.{dataset.name}.source is {dataset.source!r}; correct it to file:PATH, hub:ID or package:NAME"
            )
        if kind == "package":
            open_package_source(name, max_row_bytes=config.prompts.max_row_bytes)


def check_values(spec: TargetSpec, config: RunConfig) -> None:
    """What the config says of the target fits the target; raises `ConfigError` naming the key, its value and the range.

    Each of these would otherwise fail, or spoil data, in a later phase.
    """
    from eyas.merging.merge import dataset_names
    from eyas.merging.vocabulary import forced_tokens
    from eyas.prompts.preparation import longest_prompt

    longest = _longest_context(spec, config)
    if config.target.context_length > longest:
        raise ConfigError(
            f"target.context_length is {config.target.context_length}, {spec.folder / 'config.json'} allows {longest} tokens; "
            f"lower it, or set 0 to take the target's own"
        )
    reserved = sorted(_TEMPLATE_ARGUMENTS & set(config.target.chat_template_kwargs))
    if reserved:
        raise ConfigError(
            f"target.chat_template_kwargs sets {reserved[0]!r}, which Eyas sets itself for every prompt; "
            "keep only arguments of the template's own, such as enable_thinking"
        )
    size, default = config.merging.draft_vocab_size, MergingConfig.model_fields["draft_vocab_size"].default
    if size > spec.vocab_size and size != default:  # a small target under the default keeps its whole vocabulary
        raise ConfigError(
            f"merging.draft_vocab_size is {size}, the vocabulary of target {spec.folder} is {spec.vocab_size}; "
            f"set it to at most {spec.vocab_size}"
        )
    if size < (num_forced := len(forced_tokens(spec, config))):
        raise ConfigError(
            f"merging.draft_vocab_size is {size}, the target's end, think and tool tokens alone are {num_forced}; "
            "raise it: 8192 to 32768 is usual"
        )
    longest_prompt(spec, config.prompts)
    tokens = config.server.engine.max_total_tokens
    if config.server.kind == "embedded" and 0 < tokens < spec.context_length:
        raise ConfigError(
            f"server.engine.max_total_tokens is {tokens}, one request of target {spec.folder} may hold {spec.context_length}; "
            "raise it, lower target.context_length, or set 0 to derive it from memory"
        )
    dataset_names(config)
    num_processes = config.draft.processes * config.draft.hosts
    if config.hidden.disk_budget and num_processes > 1:
        raise ConfigError(
            f"hidden.disk_budget is {config.hidden.disk_budget:,} and {num_processes} processes are to train; a window of shards "
            "serves one: set draft.processes and draft.hosts to 1, or hidden.disk_budget to 0"
        )


def check_later_phases(spec: TargetSpec, config: RunConfig, api_key: str) -> None:
    """What phases 4 to 6 would refuse when they begin, days from now; raises `ConfigError`."""
    from eyas.draft.spec import DraftSpec
    from eyas.hidden.demands import check_codec, check_source
    from eyas.speculate.servers import check_shapes
    from eyas.speculate.sets import check_sets

    check_source(config, api_key)
    check_codec(config.hidden, spec)
    if not config.draft.warm_start:
        DraftSpec.from_target(spec, config.draft, min(config.merging.draft_vocab_size, spec.vocab_size))
    packages = {
        "tensorboard": ("draft.tensorboard", "eyas[watch]", config.draft.tensorboard),
        "wandb": ("draft.wandb_project", "eyas[wandb]", bool(config.draft.wandb_project)),
        "deepspeed": ("draft.zero_stage", "eyas[train]", config.draft.zero_stage > 0 and config.draft.processes > 1),
    }
    for package, (key, extra, is_wanted) in packages.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key} wants the package {package}, which is not installed; pip install '{extra}', or leave it out")
    check_shapes(config)
    check_sets(config, spec)


def _longest_context(spec: TargetSpec, config: RunConfig) -> int:
    """Tokens that the target's own config allows, with a scaling of its positions that the config states apart."""
    own = load_target(config.target.model_copy(update={"context_length": 0})).context_length
    scaling = spec.rope["scaling"] or {}
    return max(own, int(float(scaling.get("factor") or 1) * int(scaling.get("original_max_position_embeddings") or 0)))


def check_target(spec: TargetSpec, config: RunConfig) -> None:
    """The target can chat, knows its stop tokens and, where we run it ourselves, can be hooked; raises `ConfigError`."""
    from transformers.utils.logging import set_verbosity_error

    from eyas.generation.sampling import check_stop_tokens
    from eyas.target.tokenizer import load_tokenizer

    set_verbosity_error()  # type: ignore[no-untyped-call]  # what transformers would warn of here, we refuse in our own words
    check_stop_tokens(config.generation, spec, load_tokenizer(spec))
    if config.hidden.source == "transformers":
        check_hookable(spec)


def check_hookable(spec: TargetSpec) -> None:
    """The target's model class has a list of as many decoder blocks as the config says; nothing is loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        model_config = AutoConfig.from_pretrained(spec.folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"target {spec.folder} ({spec.architecture or spec.model_type}) cannot be built by transformers: "
            f"{' '.join(str(error).split())[:200]}; use hidden.source sglang, or another target"
        ) from error
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == spec.num_layers]
    if not lists or model.get_output_embeddings() is None:
        raise ConfigError(
            f"target {spec.folder} ({spec.architecture}) has no list of {spec.num_layers} blocks and lm_head to read states from; "
            "use hidden.source sglang, or another target"
        )


def check_port(port: int) -> None:
    """Nothing listens on the engine's fixed port; raises `ConfigError`."""
    if not port:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"server.engine.port {port} is in use ({error.strerror}); end what listens there, or set it to 0 for a free one"
            ) from error
