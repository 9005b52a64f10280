"""A block by the name that a flow was given."""

from __future__ import annotations

from typing import TypeVar

from prefect.blocks.core import Block

from eyas.errors import ConfigError

AnyBlock = TypeVar("AnyBlock", bound=Block)


async def load_block(kind: type[AnyBlock], name: str) -> AnyBlock:
    """The block of this kind and name; raises `ConfigError` that says how to make it."""
    try:
        return await kind.aload(name)
    except ValueError as error:
        title = kind._block_type_name
        raise ConfigError(
            f"there is no {title} block named {name!r}; create it in the UI under Blocks, or clear the field"
        ) from error
