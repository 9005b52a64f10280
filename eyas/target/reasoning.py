"""Reasoning, answer and tool calls of a reply, split by token ids and by nothing else.

A reply is never decoded, parsed and re-encoded: markers are token ids (a sequence of ids where a
tokenizer has no single one), and spans are positions. The rules, each with a test:

| reply | reasoning | answer | closed |
|---|---|---|---|
| prompt opened think, `R </think> A` | R | A | yes |
| `<think> R </think> A`, `R </think> A` (close only) | R | A | yes |
| nothing but blanks before the close | none | A | yes |
| tool section before the close (kimi-k2) | up to the section | what follows it | yes |
| prompt opened think, no close, `stop` | none | all | no |
| no close, cut by `length` inside think | all | none | no |
| model opened think itself, no close, `stop` | all after the tag | none | no |
| no think at all | none | all | no |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eyas.errors import ConfigError
from eyas.target.config import TargetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
Span = tuple[int, int]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_TOOL_SECTIONS = (
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<tool_call>", "</tool_call>"),
)
_BLANKS = ("\n", "\n\n", "\n\n\n", " ", "  ", " \n", " \n\n", "\t")


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Half-open positions of the parts of a reply, tags and end token left out; None where a part is absent or blank."""

    reasoning: Span | None
    answer: Span | None
    tool_calls: Span | None
    is_closed: bool


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How one target marks its reasoning; `none` has empty markers and every reply is an answer."""

    name: str
    open_ids: Ids = ()
    close_ids: Ids = ()
    tool_begin_ids: Ids = ()
    tool_end_ids: Ids = ()
    tool_section_closes: bool = False
    always_reasons: bool = False
    blank_ids: frozenset[int] = frozenset()
    end_token_ids: frozenset[int] = frozenset()

    def is_open_at_end(self, input_ids: Sequence[int]) -> bool:
        """True if a prompt ends in an opened think block, blanks aside."""
        if not self.open_ids:
            return False
        stop = len(input_ids)
        while stop and input_ids[stop - 1] in self.blank_ids:
            stop -= 1
        return tuple(input_ids[max(0, stop - len(self.open_ids)) : stop]) == self.open_ids

    def split(self, output_ids: Sequence[int], opens_think: bool, offset: int = 0, *, finish_reason: str = "stop") -> Spans:
        """Spans of a reply's parts, shifted by `offset` (the prompt's length gives positions in prompt + output)."""
        ids = list(output_ids)
        stop = len(ids) - 1 if ids and ids[-1] in self.end_token_ids else len(ids)
        tool_start = _find(ids, self.tool_begin_ids, 0, stop)
        reasoning, rest, is_closed = self._split_think(ids, stop, opens_think, tool_start, finish_reason)
        answer, tool_calls = self._split_tools(ids, rest, stop) if rest is not None else (None, None)
        return Spans(
            reasoning=_shift(self._unless_blank(ids, reasoning), offset),
            answer=_shift(self._unless_blank(ids, answer), offset),
            tool_calls=_shift(tool_calls, offset),
            is_closed=is_closed,
        )

    def _split_think(
        self, ids: list[int], stop: int, opens_think: bool, tool_start: int, finish_reason: str
    ) -> tuple[Span | None, int | None, bool]:
        """(reasoning, where the rest starts or None, is_closed)."""
        if not self.open_ids:
            return None, 0, False
        first = next((index for index in range(stop) if ids[index] not in self.blank_ids), stop)
        opened = _find(ids, self.open_ids, 0, stop)
        opens_itself = opened == first and first < stop
        start = opened + len(self.open_ids) if opens_itself else 0
        close = _find(ids, self.close_ids, start, stop)
        is_inside = opens_think or opens_itself
        if self.tool_section_closes and is_inside and tool_start >= start and (close < 0 or tool_start < close):
            return (start, tool_start), tool_start, True
        if close >= 0 and (is_inside or opened < 0 or opened > close):
            return (start, close), close + len(self.close_ids), True
        if is_inside and (opens_itself or finish_reason == "length"):
            return (start, stop), None, False
        return None, 0, False

    def _split_tools(self, ids: list[int], start: int, stop: int) -> tuple[Span | None, Span | None]:
        begin = _find(ids, self.tool_begin_ids, start, stop)
        if begin < 0:
            return (start, stop), None
        end = stop
        last = _find_last(ids, self.tool_end_ids, begin, stop)
        if last >= 0:
            end = last + len(self.tool_end_ids)
        before: Span = (start, begin)
        return (before if self._unless_blank(ids, before) else (end, stop)), (begin, end)

    def _unless_blank(self, ids: list[int], span: Span | None) -> Span | None:
        if span is None or all(ids[index] in self.blank_ids for index in range(*span)):
            return None
        return span


def find_reasoning_format(
    tokenizer: PreTrainedTokenizerBase, config: TargetConfig, *, end_token_ids: Collection[int] = ()
) -> ReasoningFormat:
    """The format that `config.reasoning` names, or the one that the tokenizer and its template show.

    Found: `none` without think tokens or a template that knows them; `kimi-k2` by its tool section;
    `qwen3` by the template's `enable_thinking`; else `deepseek-r1`. A target always reasons, unless its
    generation prompt closes the think block or the config says otherwise.
    """
    template = _template_text(tokenizer)
    name = config.reasoning if config.reasoning != "auto" else _recognise(tokenizer, template)
    begin, end = next((pair for pair in _TOOL_SECTIONS if _token_id(tokenizer, pair[0]) is not None), ("", ""))
    plain = ReasoningFormat(
        name=name,
        tool_begin_ids=_encode(tokenizer, begin),
        tool_end_ids=_encode(tokenizer, end),
        blank_ids=frozenset(ids[0] for ids in (_encode(tokenizer, blank) for blank in _BLANKS) if len(ids) == 1),
        end_token_ids=frozenset(end_token_ids) or frozenset([tokenizer.eos_token_id]),
    )
    if name == "none":
        if config.must_reason:
            raise ConfigError(
                "target.always_reasons is yes, but the target's reasoning format is none (no think tokens in its tokenizer and "
                "template, or target.reasoning says so); set target.reasoning to its format, or always_reasons to no"
            )
        return plain
    always = not _prompt_closes_think(tokenizer, config) if config.must_reason is None else config.must_reason
    return replace(
        plain,
        open_ids=_encode(tokenizer, THINK_OPEN),
        close_ids=_encode(tokenizer, THINK_CLOSE),
        tool_section_closes=name == "kimi-k2",
        always_reasons=always,
    )


def _recognise(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    if any(_token_id(tokenizer, tag) is None for tag in (THINK_OPEN, THINK_CLOSE)) or "think" not in template:
        return "none"
    if _token_id(tokenizer, _TOOL_SECTIONS[0][0]) is not None:
        return "kimi-k2"
    return "qwen3" if "enable_thinking" in template else "deepseek-r1"


def _prompt_closes_think(tokenizer: PreTrainedTokenizerBase, config: TargetConfig) -> bool:
    """True if the generation prompt holds a closed think block (`enable_thinking: false` and the like)."""
    conversation = [{"role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"tokenize": False, **config.chat_template_kwargs}
    with_prompt = str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **options))
    without = str(tokenizer.apply_chat_template(conversation, add_generation_prompt=False, **options))
    return THINK_CLOSE in with_prompt.removeprefix(without)


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """The id of `token` if it is one token of the vocabulary."""
    value = tokenizer.convert_tokens_to_ids(token)
    return value if isinstance(value, int) and value >= 0 and value != tokenizer.unk_token_id else None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Ids:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _find(ids: list[int], wanted: Ids, start: int, stop: int) -> int:
    """First position of the id sequence `wanted` in ids[start:stop], or -1; an empty sequence is nowhere."""
    if not wanted:
        return -1
    for index in range(start, stop - len(wanted) + 1):
        if ids[index] == wanted[0] and tuple(ids[index : index + len(wanted)]) == wanted:
            return index
    return -1


def _find_last(ids: list[int], wanted: Ids, start: int, stop: int) -> int:
    found = position = _find(ids, wanted, start, stop)
    while position >= 0:
        found, position = position, _find(ids, wanted, position + 1, stop)
    return found


def _shift(span: Span | None, offset: int) -> Span | None:
    return None if span is None else (span[0] + offset, span[1] + offset)
