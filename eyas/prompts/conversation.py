"""A conversation in its one normal form, and the ids made from it.

Every converter ends here: roles are system, user, assistant or tool, content is a string, tool calls
carry their arguments as an object. Dumped compactly in this order it is what is hashed and stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from eyas.errors import RecordError

Message = dict[str, Any]

ROLE_ALIASES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Names of roles in public data, and the role each one is. An unknown name is a reject."""

MEDIA_KEYS = (
    "image",
    "images",
    "image_url",
    "input_image",
    "audio",
    "audios",
    "input_audio",
    "video",
    "videos",
    "video_url",
)
"""Names under which rows, turns and parts of a content hold what is no text."""

PROMPT_ROLES = ("user", "tool")
"""Roles that a prompt may end with: what an assistant answers."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in normal form and the tools they may call (JSON schema objects as OpenAI's API takes them)."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> str:
    """Compact JSON in the order given; raises `RecordError` for NaN and for what is no JSON (dates and bytes of Parquet)."""
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError) as error:
        raise RecordError("bad_value", f"a message or tool holds a value that is no JSON: {error}") from error


def hash16(*parts: str | bytes) -> bytes:
    """16-byte BLAKE2b of the parts, each preceded by its length so that no two lists of parts collide."""
    encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return blake2b(
        b"".join([piece for data in encoded for piece in (len(data).to_bytes(8, "little"), data)]), digest_size=16
    ).digest()


def record_id(dataset: str, conversation: bytes, tools: str, turn: int, ordinal: int = 0) -> bytes:
    """A record's id, 16 bytes; `conversation` is the hash of the whole conversation, `tools` their dump."""
    return hash16(dataset, conversation, tools, str(turn), str(ordinal))


def is_heldout(conversation: bytes, share: float) -> bool:
    """True if the conversation belongs to the held-out split: a function of its hash and the share alone."""
    return int.from_bytes(conversation[:8], "big") < share * 2**64


def texts_of(messages: Iterable[Message]) -> list[str]:
    """Contents of the turns that make a conversation what it is: all but system turns."""
    return [message["content"] for message in messages if message["role"] != "system"]
