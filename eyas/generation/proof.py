"""The render proof: the server renders a few prompts of each dataset itself, and its ids must be ours."""

from __future__ import annotations

import logging
from pathlib import Path

from eyas.errors import ConfigError
from eyas.generation.records import conversations, rows_with_tools
from eyas.sglang.client import RequestRefused, SGLangClient
from eyas.target.rendering import Renderer

log = logging.getLogger(__name__)


async def prove_rendering(client: SGLangClient, renderer: Renderer, dataset: str, path: Path, num_prompts: int) -> int:
    """Compare `num_prompts` prompts of `path` (half of them with tools, where there are such) with the server's own rendering.

    Returns the number compared; raises `ConfigError` with the first position that differs.
    """
    with_tools = rows_with_tools(path, (num_prompts + 1) // 2)
    rows = list(dict.fromkeys([*with_tools, *range(num_prompts)]))[:num_prompts]
    examples = conversations(path, rows)
    for messages, tools, input_ids in examples:
        try:
            seen = await client.render(messages, tools, renderer.template_kwargs)
        except RequestRefused as error:
            raise ConfigError(f"dataset {dataset}: the server refuses to render a prompt that we rendered: {error}") from error
        if seen != input_ids:
            raise ConfigError(_describe(dataset, client.url, seen, input_ids, bool(tools), renderer))
    log.info(
        "render proof dataset=%s prompts=%d with_tools=%d", dataset, len(examples), sum(bool(tools) for _, tools, _ in examples)
    )
    return len(examples)


def _describe(dataset: str, url: str, seen: list[int], ours: list[int], has_tools: bool, renderer: Renderer) -> str:
    # one may be the head of the other: then they differ from its end on
    at = next((index for index, pair in enumerate(zip(seen, ours, strict=False)) if pair[0] != pair[1]), min(len(seen), len(ours)))
    around = slice(max(0, at - 4), at + 4)
    decode = renderer.tokenizer.decode
    return (
        f"dataset {dataset}: {url} renders {'a prompt with tools' if has_tools else 'a prompt'} into {len(seen)} ids, we into "
        f"{len(ours)}; they differ from position {at}: {decode(seen[around])!r} there, {decode(ours[around])!r} here. "
        "Serve the template of target.model (--chat-template), or prepare again with the served one "
        "and the same target.chat_template_kwargs"
    )
