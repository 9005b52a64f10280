"""Tools and tool calls: their normal form, their ids, and their form as text.

Some chat templates ignore `tools` and `tool_calls` without a word. For such a target the functions are
written into the system turn and calls into the assistant's text (prompt-style function calling).
"""

from __future__ import annotations

import json
from typing import Any

from eyas.errors import RecordError
from eyas.prompts.conversation import Conversation, Message, dump

_INTRODUCTION = (
    'You can call functions. To call one, answer with a JSON object {"name": ..., "arguments": {...}} '
    "between <tool_call> and </tool_call>. If no function fits, say so. Functions:"
)


def normal_tools(value: Any) -> list[dict[str, Any]]:
    """Tools as OpenAI's API takes them, from a list, its JSON text, or bare functions; raises `RecordError`."""
    if isinstance(value, str):
        if not value.strip():
            return []
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RecordError("bad_tools", f"tools are no JSON: {error}") from error
    if value is None:
        return []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RecordError("bad_tools", f"tools are a {type(value).__name__}, wanted a list of objects")
    tools = [tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool} for tool in value]
    for tool in tools:
        if not isinstance(tool["function"].get("name"), str):
            raise RecordError("bad_tools", "a tool has no name")
    return tools


def normal_call(call: Any) -> dict[str, Any]:
    """One tool call with its arguments as an object where they are JSON; raises `RecordError`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError("bad_tool_call", f"a tool call is {str(call)[:80]!r}, wanted an object with a name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    normal: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str) and call["id"]:
        normal["id"] = call["id"]
    return {**normal, "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}


def link_calls(messages: list[Message]) -> list[Message]:
    """Give calls without id one (`functions.NAME:N`, Kimi's own form), and tool turns the id of the call they answer."""
    linked: list[Message] = []
    waiting: list[str] = []
    number = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                call_id = call.get("id") or f"functions.{call['function']['name']}:{number}"
                calls.append({"type": "function", "id": call_id, "function": call["function"]})
                number += 1
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or (waiting[0] if waiting else "")
            if call_id in waiting:
                waiting.remove(call_id)
            message = {**message, "tool_call_id": call_id} if call_id else message
        linked.append(message)
    return linked


def as_text(conversation: Conversation, *, keeps_tool_role: bool) -> Conversation:
    """The same conversation with tools in the system turn and calls in the assistant's text; no tools remain."""
    messages = [_message_as_text(message, keeps_tool_role) for message in conversation.messages]
    if conversation.tools:
        listing = "\n".join([_INTRODUCTION, *(dump(tool["function"]) for tool in conversation.tools)])
        if messages and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{listing}"}
        else:
            messages.insert(0, {"role": "system", "content": listing})
    return Conversation(messages=messages)


def _message_as_text(message: Message, keeps_tool_role: bool) -> Message:
    if message["role"] == "tool" and not keeps_tool_role:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key not in ("tool_call_id", "tool_calls")}
    if not message.get("tool_calls"):
        return kept
    calls = "\n".join(f"<tool_call>\n{dump(call['function'])}\n</tool_call>" for call in message["tool_calls"])
    return {**kept, "content": "\n".join(part for part in (message["content"], calls) if part)}
