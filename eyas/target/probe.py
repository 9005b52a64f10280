"""What the target's chat template does and does not do, found out once before any row is rendered.

A template may ignore tools, drop a system turn in the middle, or forget the generation prompt without
a word; rows that would lose something are then rejected or written in another way, each counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eyas.errors import ConfigError, RecordError
from eyas.target.rendering import Message, Renderer, template_message

_MARK = "zqmarkerqz"
_USER: Message = {"role": "user", "content": "Which city?"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": "Looks a city up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class TemplateTraits:
    """What a template renders; each False names rows that phase 1 must treat."""

    renders_tools: bool
    renders_tool_calls: bool
    renders_tool_role: bool
    renders_system: bool
    renders_middle_system: bool
    generation_prompt: str

    def as_json(self) -> dict[str, Any]:
        """The traits as a plain dictionary, for a manifest."""
        return asdict(self)


def probe_template(renderer: Renderer) -> TemplateTraits:
    """Find a template's traits; raises `ConfigError` where prompts made with it could not be right.

    Proven here: the generation prompt exists and only adds to the end, text and object arguments give
    the same ids, and rendering in batches equals `apply_chat_template(tokenize=True)`.
    """
    generation_prompt = _check_generation_prompt(renderer)
    _check_same_ids(renderer)
    history: list[Message] = [_USER, {"role": "assistant", "content": "", "tool_calls": [_call({"city": "Paris"})]}]
    marked: list[Message] = [_USER, {"role": "assistant", "content": "", "tool_calls": [_call({"city": _MARK})]}]
    return TemplateTraits(
        renders_tools=_renders(renderer, [_USER], [_TOOL]),
        renders_tool_calls=_renders(renderer, [*marked, {"role": "tool", "content": "7"}]),
        renders_tool_role=_renders(renderer, [*history, {"role": "tool", "content": _MARK}]),
        renders_system=_renders(renderer, [{"role": "system", "content": _MARK}, _USER]),
        renders_middle_system=_renders(
            renderer, [_USER, {"role": "assistant", "content": "Paris."}, {"role": "system", "content": _MARK}, _USER]
        ),
        generation_prompt=generation_prompt,
    )


def _renders(renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> bool:
    """True if the template accepts the conversation and its marker is in the prompt."""
    try:
        return _MARK in renderer.render_text(messages, tools or [])
    except RecordError:
        return False


def _check_generation_prompt(renderer: Renderer) -> str:
    where = renderer.spec.folder
    try:
        with_prompt = renderer.render_text([_USER])
        without = renderer.render_text([_USER], adds_generation_prompt=False)
    except RecordError as error:
        raise ConfigError(f"target {where}: {error}; a target must render a single user turn") from error
    ids, prefix = renderer.encode([with_prompt, without])
    if len(ids) <= len(prefix) or ids[: len(prefix)] != prefix:
        raise ConfigError(
            f"target {where}: add_generation_prompt changes {len(prefix)} ids into {len(ids)} that do not begin with them; "
            "wanted the same ids and a generation prompt after them; correct the chat template"
        )
    return with_prompt.removeprefix(without)


def _check_same_ids(renderer: Renderer) -> None:
    """Batches equal the tokenizer's own way, and arguments as text equal arguments as an object."""
    conversations: list[list[Message]] = [
        [_USER],
        [{"role": "user", "content": f"  {renderer.tokenizer.eos_token} naïve 😀\n\n{{x}} <think>"}],
        [_USER, {"role": "assistant", "content": "Paris.\n"}, {"role": "user", "content": "And then?"}],
    ]
    for messages in conversations:
        wanted = renderer.tokenizer.apply_chat_template(
            [template_message(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **renderer.template_kwargs,
        )
        if list(wanted) != renderer.render(messages).input_ids:
            raise ConfigError(
                f"target {renderer.spec.folder}: its apply_chat_template tokenizes otherwise than its tokenizer does; "
                "its prompts cannot be made in batches; use a tokenizer whose class does not override tokenize=True"
            )
    results = []
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}
        try:
            results.append(renderer.render([_USER, call, {"role": "tool", "content": "7"}]).input_ids)
        except RecordError:
            results.append([])
    if results[0] != results[1]:
        raise ConfigError(f"target {renderer.spec.folder}: tool-call arguments as text and as an object render to different ids")


def _call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "functions.lookup:0", "function": {"name": "lookup", "arguments": arguments}}
