"""The prompts of the benchmark: this run's held-out ones, standard sets from packages, one's own from a file."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.config import RunConfig
from eyas.errors import ConfigError
from eyas.prompts.benchsets import load_benchmark_prompts, open_benchmark_set
from eyas.prompts.sources import check_hub
from eyas.target.rendering import Renderer
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
from eyas.workspace import RunFolder

HELDOUT = "heldout"


@dataclass(frozen=True, kw_only=True)
class BenchmarkPrompt:
    """One rendered prompt; `dataset` is the run's dataset for held-out prompts, otherwise the set's name."""

    id: str
    dataset: str
    input_ids: list[int]


def set_name(source: str) -> str:
    """Short name of a set for folders and tables: `gsm8k` → `gsm8k`, `package:mt-bench` → `mt-bench`, `file:/a/own.jsonl` →
    `own`, `hub:openai/gsm8k,main,test` → `gsm8k`."""
    kind, separator, name = source.partition(":")
    if not separator:
        return kind
    name = name.split(",")[0] if kind == "hub" else name
    return name.rsplit("/", 1)[-1].split(".")[0]


def check_sets(config: RunConfig, spec: TargetSpec) -> None:
    """Raise `ConfigError` for what the benchmark would refuse when all else is done; a hub is not asked for its sets."""
    sources = config.benchmark.sets
    check_set_names(sources)
    for source in sources:
        if source != HELDOUT and (identity := open_benchmark_set(source).identity)["kind"] == "hub":
            check_hub(identity["id"])
    if HELDOUT in sources and not config.prompts.heldout_share:
        raise ConfigError("benchmark.sets names heldout and prompts.heldout_share is 0; raise it (0.05 is usual) or leave it out")
    if spec.context_length - config.benchmark.max_new_tokens < 1:
        raise ConfigError(
            f"benchmark.max_new_tokens is {config.benchmark.max_new_tokens}, the target's context is {spec.context_length} tokens; "
            "lower it, so that prompts have room"
        )


def check_set_names(sources: list[str]) -> None:
    """Raise `ConfigError` where two sets would be written under one name."""
    names = [set_name(source) for source in sources]
    doubled = sorted({name for name in names if names.count(name) > 1 or (name == HELDOUT and HELDOUT not in sources)})
    if doubled:
        raise ConfigError(f"benchmark.sets {sources} give one name twice: {', '.join(doubled)}; rename a file or leave one out")


def load_set(run: RunFolder, config: RunConfig, spec: TargetSpec, source: str) -> list[BenchmarkPrompt]:
    """The prompts of one set, rendered, `benchmark.prompts_per_set` at most.

    Raises `ConfigError` where the set is empty or unknown, or a prompt leaves no room for a reply in the context.
    """
    count = config.benchmark.prompts_per_set
    room = spec.context_length - config.benchmark.max_new_tokens
    prompts = heldout_prompts(run, config, count, room) if source == HELDOUT else _standard_prompts(config, spec, source, count)
    for prompt in prompts:
        if len(prompt.input_ids) > room:
            raise ConfigError(
                f"benchmark set {source}: prompt {prompt.id} has {len(prompt.input_ids)} tokens, {room} leave room for a reply of "
                f"{config.benchmark.max_new_tokens} in the context; lower benchmark.max_new_tokens or remove the prompt"
            )
    return prompts


def _standard_prompts(config: RunConfig, spec: TargetSpec, source: str, count: int) -> list[BenchmarkPrompt]:
    conversations = load_benchmark_prompts(source)
    # Sets are sorted by subject, so prompts are taken at even distances, never the first ones.
    taken = min(count, len(conversations))
    places = [place * len(conversations) // taken for place in range(taken)]
    renderer = Renderer(spec, load_tokenizer(spec), config.target)
    name = set_name(source)
    return [
        BenchmarkPrompt(
            id=f"{name}-{place}",
            dataset=name,
            input_ids=renderer.render(conversations[place].messages, conversations[place].tools).input_ids,
        )
        for place in places
    ]


def heldout_prompts(run: RunFolder, config: RunConfig, count: int, room: int) -> list[BenchmarkPrompt]:
    """`count` held-out prompts of `room` tokens at most, dealt from the datasets in turn, each in order of id.

    That order is random as to content.

    Raises `ConfigError` where the run has none.
    """
    piles = [_heldout_of(run, dataset.name, count, room) for dataset in config.prompts.datasets]
    dealt = [pile[turn] for turn in range(count) for pile in piles if turn < len(pile)]
    if not dealt:
        raise ConfigError(
            f"benchmark.sets names heldout, but no prompt of at most {room} tokens was held out; raise prompts.heldout_share, "
            "lower benchmark.max_new_tokens, or leave the set out"
        )
    return dealt[:count]


def _heldout_of(run: RunFolder, dataset: str, count: int, room: int) -> list[BenchmarkPrompt]:
    table = pq.read_table(run.prompts(dataset) / "prompts.parquet", columns=["id", "split", "input_ids"])
    fits = pc.less_equal(pc.list_value_length(table["input_ids"]), room)
    rows = table.filter(pc.and_(pc.equal(table["split"], HELDOUT), fits)).slice(0, count).to_pylist()
    return [BenchmarkPrompt(id=row["id"], dataset=dataset, input_ids=row["input_ids"]) for row in rows]
