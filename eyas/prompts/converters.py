"""Rows of public datasets become conversations: roles and tools in = roles and tools out.

One function per shape of row; `convert` recognises the shape where the config does not name it. A row
that does not fit is a `RecordError` that names the value seen. Cleaning and cutting come afterwards.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from eyas.errors import RecordError
from eyas.prompts.conversation import MEDIA_KEYS, ROLE_ALIASES, Conversation, Message
from eyas.prompts.tools import link_calls, normal_call, normal_tools

Row = dict[str, Any]
Converter = Callable[[Row], Conversation]

_PROMPT_KEYS = ("prompt", "instruction", "question", "query", "problem", "input", "text")
_SYSTEM_KEYS = ("system", "system_prompt")


def convert(value: Any, converter: str = "auto") -> Conversation:
    """The conversation in a row; raises `RecordError` where the row has no known shape or a bad value."""
    if isinstance(value, list):  # a row that is the list of messages itself
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RecordError("not_an_object", f"the row is a {type(value).__name__}, wanted an object")
    row: Row = value
    return CONVERTERS[converter if converter != "auto" else recognise(row)](row)


def recognise(row: Row) -> str:
    """Name of the converter that fits the row's keys; raises `RecordError("unknown_shape")` naming the keys seen."""
    if "question" in row and "function" in row:
        return "bfcl"
    if isinstance(row.get("chat"), str):
        return "glaive"
    if "trajectory" in row or ("history" in row and isinstance(row["history"], list) and "instruction" not in row):
        return "swe-agent"
    if "messages" in row:
        return "messages"
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if "instruction" in row:
        return "alpaca"
    if any(key in row for key in _PROMPT_KEYS):
        return "prompt"
    raise RecordError("unknown_shape", f"the row has the keys {sorted(row)[:12]}, none that a converter knows")


def refuse_media(holder: Row, place: str) -> None:
    """Raise `RecordError` where a row, turn or part holds a picture, a sound or a film under one of the usual names."""
    for key in MEDIA_KEYS:
        value = holder.get(key)
        if any(value.values()) if isinstance(value, dict) else any(value) if isinstance(value, list) else value:
            raise RecordError("not_text", f"{place} holds {key!r}, the target takes text only")


def from_messages(row: Row) -> Conversation:
    """OpenAI messages under `messages` (a list or its JSON text), with `tools` beside them."""
    return _conversation(_listed(row.get("messages"), "messages"), row)


def from_sharegpt(row: Row) -> Conversation:
    """ShareGPT: `conversations` of `from`/`value` (or `role`/`content`), with `system` and `tools` beside them."""
    turns = row.get("conversations", row.get("conversation"))
    return _conversation(_listed(turns, "conversations"), row)


def from_alpaca(row: Row) -> Conversation:
    """Alpaca: `instruction`, optional `input`, `system` and `history` of (question, answer) pairs."""
    parts = [_text(row.get(key)) for key in ("instruction", "input")]
    turns: list[Any] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RecordError("bad_history", f"history is a {type(history).__name__}, wanted a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RecordError("bad_history", f"history holds {str(pair)[:80]!r}, wanted pairs of question and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns.append({"role": "user", "content": "\n\n".join(part for part in parts if part.strip())})
    return _conversation(turns, row)


def from_prompt(row: Row) -> Conversation:
    """A single prompt under one of the usual names; a list of messages there is a conversation."""
    key = next((name for name in _PROMPT_KEYS if row.get(name) is not None), None)
    if key is None:
        raise RecordError("missing_field", f"none of {', '.join(_PROMPT_KEYS)} is in the row")
    value = row[key]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _conversation(value, row)
    return _conversation([{"role": "user", "content": value}], row)


_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE|SYSTEM):[ \t]?")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool", "SYSTEM": "system"}
_GLAIVE_CALL = "<functioncall>"


def from_glaive(row: Row) -> Conversation:
    """Glaive function calling: one string `chat` with USER, ASSISTANT and FUNCTION RESPONSE, functions inside `system`."""
    before, *pieces = _GLAIVE_TURN.split(_text(row.get("chat")))
    if before.replace("<|endoftext|>", "").strip():
        raise RecordError("bad_turn", f"the chat begins with {before.strip()[:80]!r}, wanted USER: or another role")
    turns = [_glaive_turn(_GLAIVE_ROLES[role], text) for role, text in zip(pieces[::2], pieces[1::2], strict=True)]
    system, tools = _glaive_system(_text(row.get("system")))
    return _conversation(turns, {**row, "system": system, "tools": tools})


def _glaive_turn(role: str, text: str) -> Message:
    text = text.replace("<|endoftext|>", "").strip()
    if role != "assistant" or _GLAIVE_CALL not in text:
        return {"role": role, "content": text}
    said, _, call = text.partition(_GLAIVE_CALL)
    return {"role": "assistant", "content": said.strip(), "tool_calls": [_glaive_call(call.strip())]}


def _glaive_call(text: str) -> Row:
    """`{"name": "f", "arguments": '{"a": 1}'}`: arguments in single quotes, so neither JSON nor always Python."""
    quoted = re.fullmatch(r"""\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}""", text, re.DOTALL)
    if quoted:
        return {"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")}
    for parse in (json.loads, ast.literal_eval):
        try:
            call = parse(text)
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(call, dict):
            return call
    raise RecordError("bad_tool_call", f"a function call is {text[:80]!r}, wanted name and arguments")


def _glaive_system(text: str) -> tuple[str, list[Row]]:
    """System text, and the JSON functions that follow its first sentence."""
    text = re.sub(r"^\s*SYSTEM:\s*", "", text)
    start = text.find("\n{") + 1 if "\n{" in text else text.find("{")
    if start < 0 or not text[start:].lstrip().startswith("{"):
        return text.strip(), []
    decoder, tools, position = json.JSONDecoder(), [], start
    while position < len(text):
        try:
            tool, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise RecordError("bad_tools", f"a function in the system text is no JSON: {error}") from error
        tools.append(tool)
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
    introduction = text[:start].strip()
    return re.sub(r"\s*Use them if required\s*-?\s*$", " Use them if required.", introduction), tools


def from_swe_agent(row: Row) -> Conversation:
    """Agent traces: `trajectory` or `history`, a list (or its JSON text) of role and content, `text` or `system_prompt`."""
    steps = _listed(row.get("trajectory", row.get("history")), "trajectory")
    turns = []
    for step in steps:
        if not isinstance(step, dict) or not ("role" in step or "from" in step):
            raise RecordError("unknown_shape", f"a step of the trajectory is {str(step)[:80]!r}, wanted an object with a role")
        content = next((step[key] for key in ("content", "value", "text") if step.get(key)), None)
        system = step.get("system_prompt")
        if system and content and system != content:
            turns.append({"role": "system", "content": system})
        turns.append({**step, "content": content or system})
    return _conversation(turns, row)


def from_bfcl(row: Row) -> Conversation:
    """Berkeley function calling: `question` is a list of turns, each a list of messages; the first turn is the prompt."""
    question = row.get("question")
    if isinstance(question, list) and question and isinstance(question[0], list):
        question = question[0]
    tools = [_bfcl_tool(tool) for tool in _listed(row.get("function"), "function")]
    return _conversation(_listed(question, "question"), {**row, "tools": tools})


def _bfcl_tool(tool: Any) -> Row:
    if not isinstance(tool, dict):
        raise RecordError("bad_tools", f"a function is a {type(tool).__name__}, wanted an object")
    schema = {key: value for key, value in tool.items() if key != "response"}
    return {"type": "function", "function": _json_schema(schema)}


def _json_schema(value: Any) -> Any:
    """Python's names of types become JSON schema's."""
    names = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}
    if isinstance(value, dict):
        return {
            key: names.get(item.lower(), item) if key == "type" and isinstance(item, str) else _json_schema(item)
            for key, item in value.items()
        }
    return [_json_schema(item) for item in value] if isinstance(value, list) else value


CONVERTERS: dict[str, Converter] = {
    "messages": from_messages,
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
    "prompt": from_prompt,
    "glaive": from_glaive,
    "swe-agent": from_swe_agent,
    "bfcl": from_bfcl,
}
"""Every converter by the name that a config uses."""


def _conversation(turns: list[Any], row: Row) -> Conversation:
    refuse_media(row, "the row")
    messages = [_message(turn) for turn in turns]
    first = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    texts = [*(_text(row.get(key)) for key in _SYSTEM_KEYS), first or ""]
    system = "\n\n".join(dict.fromkeys(text for text in texts if text.strip()))
    if system or first is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages=link_calls(messages), tools=normal_tools(row.get("tools") or row.get("functions")))


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RecordError("bad_turn", f"a turn is a {type(turn).__name__}, wanted an object")
    refuse_media(turn, "a turn")
    name = turn.get("role") or turn.get("from")  # a Parquet struct may hold both, one of them null
    role = ROLE_ALIASES.get(name.lower()) if isinstance(name, str) else None
    if not isinstance(name, str) or role is None:
        raise RecordError("unknown_role", f"a turn has the role {name!r}; known are {', '.join(sorted(ROLE_ALIASES))}")
    content = _text(turn["content"] if turn.get("content") is not None else turn.get("value"))
    message: Message = {"role": role, "content": content}
    if name.lower() == "function_call":
        message = {"role": role, "content": "", "tool_calls": _calls_in_text(content)}
    elif role == "assistant":
        calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
        if calls:
            message["tool_calls"] = [normal_call(call) for call in _listed(calls, "tool_calls")]
        if isinstance(turn.get("reasoning_content"), str) and turn["reasoning_content"]:
            message["reasoning_content"] = turn["reasoning_content"]
    elif role == "tool" and isinstance(turn.get("tool_call_id"), str):
        message["tool_call_id"] = turn["tool_call_id"]
    return message


def _calls_in_text(text: str) -> list[Row]:
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise RecordError("bad_tool_call", f"a function_call turn is {text[:80]!r}, wanted JSON") from error
    return [normal_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _text(content: Any) -> str:
    """Text of a content: a string, null, a number, or a list of text parts; other parts are refused by name."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (int, float)):
        return str(content)
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise RecordError("bad_content", f"a content is a {type(content).__name__}, wanted text")
    return "".join(_part_text(part) for part in parts)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else type(part).__name__
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        refuse_media(part, "a text part")
        return str(part["text"])
    if kind in (*MEDIA_KEYS, "file"):
        raise RecordError("not_text", f"a content part is of type {kind!r}, the target takes text only")
    raise RecordError("bad_content", f"a content part is of type {kind!r}, wanted text")


def _listed(value: Any, key: str) -> list[Any]:
    """A list, or the list that a JSON text holds; raises `RecordError` naming the key."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecordError("bad_turns", f"{key} is text and no JSON: {error}") from error
    if not isinstance(value, list):
        raise RecordError("missing_field" if value is None else "bad_turns", f"{key} is {type(value).__name__}, wanted a list")
    return value
