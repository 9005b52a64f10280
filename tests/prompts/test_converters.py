from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.errors import RecordError
from eyas.prompts.converters import convert

_TOOL = {"name": "get_rate", "description": "Rates.", "parameters": {"type": "object", "properties": {"from": {"type": "string"}}}}


def _roles(row: Any, converter: str = "auto") -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in convert(row, converter).messages]


def test_glaive_keeps_roles_calls_and_tools() -> None:
    row = {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
        + json.dumps(_TOOL, indent=4)
        + "\n\n"
        + json.dumps({**_TOOL, "name": "other"}),
        "chat": "USER: How much is 1 USD in EUR?\n\n\nASSISTANT: <functioncall> "
        '{"name": "get_rate", "arguments": \'{"from": "USD", "note": "it\\\'s"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"rate": 0.85}\n\n\nASSISTANT: It is 0.85. <|endoftext|>\n\n\nUSER: Thanks\n\nA: USER is me\n\n\n'
        "ASSISTANT: Welcome <|endoftext|>",
    }
    conversation = convert(row)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    system, _, call, answer, *_ = conversation.messages
    assert system["content"] == "You are a helpful assistant with access to the following functions. Use them if required."
    assert call["tool_calls"] == [
        {
            "type": "function",
            "id": "functions.get_rate:0",
            "function": {"name": "get_rate", "arguments": {"from": "USD", "note": "it's"}},
        }
    ]
    assert answer == {"role": "tool", "content": '{"rate": 0.85}', "tool_call_id": "functions.get_rate:0"}
    assert conversation.messages[-2]["content"] == "Thanks\n\nA: USER is me"
    assert [tool["function"]["name"] for tool in conversation.tools] == ["get_rate", "other"]


def test_glaive_without_functions_has_none() -> None:
    conversation = convert(
        {
            "system": "SYSTEM: You are a helpful assistant, with no access to external functions.",
            "chat": "USER: Hi\n\n\nASSISTANT: Hello",
        }
    )
    assert conversation.tools == []
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [("<functioncall> not json", "bad_tool_call"), ("<functioncall> [1, 2]", "bad_tool_call"), ("<functioncall>", "bad_tool_call")],
)
def test_a_broken_glaive_call_is_a_reject(call: str, reason: str) -> None:
    with pytest.raises(RecordError) as refusal:
        convert({"system": "", "chat": f"USER: Hi\n\n\nASSISTANT: {call}"})
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    "row",
    [
        {
            "trajectory": [
                {"role": "system", "system_prompt": "S"},
                {"role": "user", "text": "U"},
                {"role": "ai", "text": "A"},
                {"role": "user", "text": "O"},
            ]
        },
        {
            "trajectory": json.dumps(
                [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": "A"},
                    {"role": "user", "content": "O"},
                ]
            )
        },
        {
            "history": [
                {"role": "system", "content": "S", "agent": "primary"},
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": "A", "action": "ls"},
                {"role": "user", "content": "O"},
            ]
        },
        {
            "messages": json.dumps(
                [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": "A"},
                    {"role": "user", "content": "O"},
                ]
            )
        },
    ],
)
def test_agent_traces_keep_every_turn(row: dict[str, Any]) -> None:
    assert _roles(row) == [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "O")]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2")]),
        ({"instruction": "Add.", "input": "", "output": "3"}, [("user", "Add.")]),
        ({"instruction": "Add.", "input": None}, [("user", "Add.")]),
        ({"instruction": "c", "history": [["a", "b"]]}, [("user", "a"), ("assistant", "b"), ("user", "c")]),
        ({"prompt": "P", "completion": "C"}, [("user", "P")]),
        ({"question": "Q", "answer": "A"}, [("user", "Q")]),
        ({"problem": "P", "solution": "S"}, [("user", "P")]),
        ({"input": "I", "output": "O"}, [("user", "I")]),
        ({"prompt": [{"role": "user", "content": "P"}]}, [("user", "P")]),
        ([{"role": "user", "content": "P"}], [("user", "P")]),
        ({"conversation": [{"from": "human", "value": "P"}]}, [("user", "P")]),
        (
            {"question": [[{"role": "user", "content": "P"}], [{"role": "user", "content": "next"}]], "function": []},
            [("user", "P")],
        ),
    ],
)
def test_shapes_are_recognised(row: Any, wanted: list[tuple[str, str]]) -> None:
    assert _roles(row) == wanted


def test_sharegpt_function_call_turns_become_calls() -> None:
    turns = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "7"},
    ]
    conversation = convert({"conversations": turns, "tools": json.dumps([_TOOL])})
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert conversation.tools == [{"type": "function", "function": _TOOL}]


def test_parallel_calls_are_answered_in_order_and_given_ids_are_kept() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"id": "mine", "function": {"name": "g", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "mine"},
        {"role": "assistant", "tool_calls": [calls[0]]},
        {"role": "tool", "content": "3"},
    ]
    linked = convert({"messages": messages}).messages
    assert [call["id"] for call in linked[1]["tool_calls"]] == ["functions.f:0", "mine"]
    assert [message["tool_call_id"] for message in linked if message["role"] == "tool"] == [
        "functions.f:0",
        "mine",
        "functions.f:2",
    ]


@pytest.mark.parametrize("tools", ["not json", 7, [7], [{"description": "no name"}]])
def test_bad_tools_are_a_reject(tools: Any) -> None:
    with pytest.raises(RecordError) as refusal:
        convert({"messages": [{"role": "user", "content": "Q"}], "tools": tools})
    assert refusal.value.reason == "bad_tools"


def test_python_type_names_become_json_schema() -> None:
    function = {
        "name": "f",
        "parameters": {"type": "dict", "properties": {"x": {"type": "float"}, "type": {"type": "string"}}},
        "response": {},
    }
    tool = convert({"question": [[{"role": "user", "content": "Q"}]], "function": [function]}).tools[0]["function"]
    assert tool == {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "number"}, "type": {"type": "string"}}},
    }
