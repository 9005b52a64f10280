"""Cleaning of one conversation: characters, empty and doubled turns, system turns in the middle.

Every rule is written here and counted; nothing is dropped or changed in silence. Characters are
repaired, structure is repaired or rejected as the config says.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Literal

from eyas.errors import RecordError
from eyas.prompts.conversation import PROMPT_ROLES, Conversation, Message

_SURROGATE = re.compile("[\ud800-\udfff]")
_ASCII_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SUSPECT = re.compile(f"{_SURROGATE.pattern[:-1]}{_CONTROLS.pattern[1:]}")
_MERGED_ROLES = ("system", "user", "assistant")


def clean_text(text: str, repairs: Counter[str]) -> str:
    """Text that UTF-8 can hold: surrogate pairs joined, lone ones replaced by U+FFFD, controls but tab, LF, CR, NEL removed."""
    if text.isascii():  # most of what comes, and five times faster as bytes
        data = text.encode("ascii").translate(None, _ASCII_CONTROLS)
        if len(data) == len(text):
            return text
        repairs["control_characters"] += 1
        return data.decode("ascii")
    if not _SUSPECT.search(text):
        return text
    if _SURROGATE.search(text):
        repairs["surrogates"] += 1
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    cleaned = _CONTROLS.sub("", text)
    if len(cleaned) != len(text):
        repairs["control_characters"] += 1
    return cleaned


def clean_value(value: Any, repairs: Counter[str]) -> Any:
    """`clean_text` on every string inside a JSON value, keys included."""
    if isinstance(value, str):
        return clean_text(value, repairs)
    if isinstance(value, list):
        return [clean_value(item, repairs) for item in value]
    if isinstance(value, dict):
        return {clean_text(key, repairs): clean_value(item, repairs) for key, item in value.items()}
    return value


def clean(
    conversation: Conversation,
    repairs: Counter[str],
    *,
    same_role_turns: Literal["merge", "reject"],
    allows_system: bool = True,
    allows_middle_system: bool = True,
) -> Conversation:
    """A conversation that can be cut into prompts; raises `RecordError` with the rule's name.

    Rules, in this order: characters; blank system turns dropped; leading assistant turns dropped
    (a continued chat); no user turn left rejects; what follows the last user or tool turn, the answer that
    no prompt holds, cut off; a blank user or assistant turn rejects; consecutive
    turns of one role merged with a blank line between, or rejected; system turns that the template
    does not render reject. Blank tool turns stay: a command may print nothing.
    """
    messages = [clean_value(message, repairs) for message in conversation.messages]
    messages = _without_blank_system(messages, repairs)
    messages = _from_first_prompt(messages, repairs)
    messages = messages[: max(index for index, message in enumerate(messages) if message["role"] in PROMPT_ROLES) + 1]
    for message in messages:
        is_blank = not message["content"].strip() and not message.get("tool_calls")
        if is_blank and message["role"] in ("user", "assistant"):
            raise RecordError("empty_turn", f"a {message['role']} turn is blank")
    messages = _merge_turns(messages, repairs, same_role_turns)
    _check_system(messages, allows_system, allows_middle_system)
    return Conversation(messages=messages, tools=clean_value(conversation.tools, repairs))


def _without_blank_system(messages: list[Message], repairs: Counter[str]) -> list[Message]:
    kept = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    if len(kept) != len(messages):
        repairs["blank_system"] += 1
    return kept


def _from_first_prompt(messages: list[Message], repairs: Counter[str]) -> list[Message]:
    if not messages:
        raise RecordError("empty", "the conversation has no turn")
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RecordError("no_user_turn", f"roles are {', '.join(message['role'] for message in messages[:8])}")
    head = [message for message in messages[:first] if message["role"] == "system"]
    if len(head) != first:
        repairs["leading_turns_dropped"] += 1
    return head + messages[first:]


def _merge_turns(messages: list[Message], repairs: Counter[str], rule: str) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        if not merged or merged[-1]["role"] != role or role not in _MERGED_ROLES:
            merged.append(message)
            continue
        if rule == "reject":
            raise RecordError("same_role_turns", f"two {role} turns follow each other; prompts.same_role_turns is reject")
        repairs["merged_turns"] += 1
        merged[-1] = _joined(merged[-1], message)
    return merged


def _joined(first: Message, second: Message) -> Message:
    texts: Message = {
        key: "\n\n".join(text for text in (first.get(key, ""), second.get(key, "")) if text.strip())
        for key in ("content", "reasoning_content")
        if key in first or key in second
    }
    joined = {**first, **second, **texts}
    calls = [*first.get("tool_calls", []), *second.get("tool_calls", [])]
    return {**joined, "tool_calls": calls} if calls else joined


def _check_system(messages: list[Message], allows_system: bool, allows_middle_system: bool) -> None:
    for index, message in enumerate(messages):
        if message["role"] != "system":
            continue
        if not allows_system:
            raise RecordError("system_not_rendered", "the target's chat template does not render a system turn")
        if index and not allows_middle_system:
            raise RecordError("system_in_middle", f"the target's chat template does not render a system turn at place {index}")


def prompt_cuts(messages: list[Message], *, every_turn: bool) -> list[int]:
    """Lengths of the prompts in a conversation: up to its last user or tool turn, and before each assistant turn if wanted."""
    ends = [index + 1 for index, message in enumerate(messages) if message["role"] in PROMPT_ROLES]
    if not ends:
        raise RecordError("no_user_turn", "no user or tool turn to end a prompt with")
    if not every_turn:
        return ends[-1:]
    return [end for end in ends if end == ends[-1] or messages[end]["role"] == "assistant"]
