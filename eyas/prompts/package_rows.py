"""How rows of packaged data become rows that the converters know: a prompt, or messages with tools.

The instructions around the data are ours; they are what makes a problem's text a request. Each function
yields no row where the data hold nothing to ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

Data = dict[str, Any]

_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def bfcl_multi_turn(row: Data, folder: Path) -> Iterator[Data]:
    """The first turn, with the functions on the path that solves the task."""
    wanted = {step.split(".")[-1] for step in row.get("path", [])}
    functions = [
        function
        for name in row.get("involved_classes", [])
        for function in _functions(folder / "data" / "multi_turn_func_doc" / f"{_DOCUMENTS[name]}.json")
        if function["name"] in wanted
    ]
    yield {"question": row["question"], "function": functions}


@lru_cache(maxsize=32)
def _functions(path: Path) -> tuple[Data, ...]:
    return tuple(json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip())


def codeio_write(row: Data, folder: Path) -> Iterator[Data]:
    """The problem with its inputs and outputs: write the function."""
    yield {
        "prompt": f"{row['task_description']}\n\n{row['input_output_spec']}\n\n"
        "Write a Python function `main_solution` that solves this. Give the code first, then one short paragraph about it."
    }


def codeio_question(row: Data, folder: Path) -> Iterator[Data]:
    """The bare question, answered in prose."""
    yield {"prompt": f"{row['task_description']}\n\nExplain step by step how you would work this out."}


def codeio_explain(row: Data, folder: Path) -> Iterator[Data]:
    """The reference code: explain it."""
    code = row["code_sample"].strip()
    if len(code) <= 2_500:
        yield {"prompt": f"What does this Python program do? Explain it to a colleague.\n\n```python\n{code}\n```"}


def query(row: Data, folder: Path) -> Iterator[Data]:
    """Rows with a `query`."""
    yield {"prompt": row["query"]}


def swe_lancer(row: Data, folder: Path) -> Iterator[Data]:
    """An issue of a real application: find the cause, propose a change. Escaped line breaks become real ones."""
    issue = f"{row['title']}\n\n{row['description']}".replace("\\r", "").replace("\\n", "\n")
    yield {
        "system": "You are a software engineer who works on a mobile and web application in React Native.",
        "prompt": f"Here is an issue from our tracker. What could cause it, and how would you fix it?\n\n{issue}",
    }


def tau2(row: Data, folder: Path) -> Iterator[Data]:
    """What a customer wants, as the customer would write it to an agent."""
    instructions = row["user_scenario"]["instructions"]
    if isinstance(instructions, dict):
        text = "\n".join(
            part for part in (instructions.get("reason_for_call"), instructions.get("known_info")) if isinstance(part, str)
        )
        service = f"{instructions.get('domain') or 'customer'} service"
    else:
        text, service = instructions, "bank"
    yield {
        "system": f"You are an agent of a {service}. Read the notes about a customer's call and write your answer to the customer.",
        "prompt": text,
    }


def agent_bench(row: Data, folder: Path) -> Iterator[Data]:
    """A task at a Linux shell."""
    yield {
        "system": "You are an assistant at a Linux shell. Say what you do, then give the commands in a bash code block.",
        "prompt": row["description"],
    }


def human_eval(row: Data, folder: Path) -> Iterator[Data]:
    """A Python function to complete."""
    yield {
        "prompt": f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```",
        "contamination_text": row["prompt"],
    }


def mt_bench(row: Data, folder: Path) -> Iterator[Data]:
    """The first of two turns; the second needs the first one's answer."""
    yield {"prompt": row["turns"][0]}


_WINDOW_TURNS = 5
_WINDOWS = 3
_WINDOW_WORDS = 25


def chitchat(row: Data, folder: Path) -> Iterator[Data]:
    """Up to three stretches of a chat, each of five turns, the first speaker of a stretch as the user.

    A turn is what one person wrote before the other answered. Stretches of fewer than 25 words say too little.
    """
    turns = [" ".join(message["text"].strip() for message in group) for group in row["messages"]]
    turns = [turn for turn in turns if turn.strip()]
    for start in range(0, _WINDOWS * _WINDOW_TURNS, _WINDOW_TURNS):
        window = turns[start : start + _WINDOW_TURNS]
        window = window[: len(window) - (len(window) + 1) % 2]  # an odd number: the user has the last word
        if sum(len(turn.split()) for turn in window) >= _WINDOW_WORDS:
            roles = ("user", "assistant")
            yield {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(window)]}
