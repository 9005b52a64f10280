"""The one render function: messages and tools become prompt ids, the same ids that the server would make.

Text comes from the tokenizer's own `apply_chat_template` (a model's class may override it, so a bare
template render could silently differ), ids from the same tokenizer without special tokens added: no
second BOS. `probe.py` proves once per run that this pair equals `apply_chat_template(tokenize=True)`.
Encoding in batches lets a fast tokenizer use every core with the interpreter lock released.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.errors import RecordError
from eyas.target.config import TargetConfig
from eyas.target.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningFormat, find_reasoning_format
from eyas.target.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_WRITTEN_TAGS = {"", THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>"}
"""Tags that templates read in an assistant's turn, that stand for tools written as text, and that people write about.
They neither open nor end a turn; most tokenizers do not call them special."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A prompt as ids, generation prompt included; `opens_think` says that it ends inside an opened think block."""

    input_ids: list[int]
    opens_think: bool


class Renderer:
    """Renders conversations for one target; holds no state but the tokenizer, safe to use from several threads."""

    def __init__(self, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase, config: TargetConfig) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.template_kwargs = dict(config.chat_template_kwargs)
        self.reasoning: ReasoningFormat = find_reasoning_format(tokenizer, config, end_token_ids=spec.eos_token_ids)
        self._control = _control_pattern(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Rendered:
        """Prompt ids of a conversation that ends in a user or tool turn; raises `RecordError` where the template refuses."""
        return self.finish(self.encode([self.render_text(messages, tools)])[0])

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, adds_generation_prompt: bool = True
    ) -> str:
        """The template's text; raises `RecordError("template_refused")` with the template's own words."""
        try:
            text = self.tokenizer.apply_chat_template(
                [template_message(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=adds_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # a template may raise anything; what it refuses is this one conversation
            raise RecordError("template_refused", f"the chat template refuses the conversation: {error}") from error
        if not isinstance(text, str):
            raise RecordError("template_refused", f"the chat template gave a {type(text).__name__}, wanted text")
        return text

    def control_token_in(self, text: str) -> str:
        """The first control token that `text` spells, or "": encoded, it would be that token and end or open a turn."""
        found = self._control.search(text)
        return found.group() if found else ""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts, no special token added."""
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def finish(self, input_ids: list[int]) -> Rendered:
        """Wrap ids of one rendered prompt."""
        return Rendered(input_ids=input_ids, opens_think=self.reasoning.is_open_at_end(input_ids))


def _control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Finds the tokenizer's special tokens, but for the tags that may be written: see `_WRITTEN_TAGS`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(tokens - _WRITTEN_TAGS, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def template_message(message: Message) -> Message:
    """The form in which a message goes into a template: content a string, tool-call arguments an object.

    SGLang's chat endpoint does the same to arguments that arrive as JSON text, so that text and object
    give the same ids.
    """
    calls = message.get("tool_calls")
    result = {**message, "content": message.get("content") or ""}
    if not calls:
        result.pop("tool_calls", None)
        return result
    result["tool_calls"] = [{**call, "function": _with_object_arguments(call.get("function") or {})} for call in calls]
    return result


def _with_object_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {**function, "arguments": {}}
    if isinstance(arguments, str):
        try:
            return {**function, "arguments": json.loads(arguments)}
        except ValueError:
            return function
    return function
