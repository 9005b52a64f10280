"""Rows become drafts: prompts as text with everything known about them but their ids, or a problem with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.errors import RecordError
from eyas.prompts.cleaning import clean, prompt_cuts
from eyas.prompts.config import DatasetConfig
from eyas.prompts.conversation import Conversation, dump, hash16, record_id, texts_of
from eyas.prompts.converters import convert
from eyas.prompts.duplicates import signature
from eyas.prompts.fields import FieldMapping
from eyas.prompts.language import LanguageFilter
from eyas.prompts.preparation import Preparation
from eyas.prompts.readers import Row
from eyas.prompts.sources import Source
from eyas.prompts.tools import as_text
from eyas.prompts.words import words_of
from eyas.target.probe import TemplateTraits

_MAX_CHARS_PER_TOKEN = 32
_LONG_CHARS = 1 << 20
_PIECE_CHARS = 1 << 18
_CUT_TOKENS = 32  # more tokens than a cut can make of what it parts


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt before encoding: the columns that are known, and its text or what is wrong with it."""

    where: str
    columns: dict[str, Any] | None = None
    text: str = ""
    problem: RecordError | None = None


class Account:
    """What was read, kept, repaired and rejected so far."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_done = 0
        self.rejected: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()

    @property
    def num_seen(self) -> int:
        return self.num_done + sum(self.rejected.values())


def drafts(preparation: Preparation, dataset: DatasetConfig, source: Source, account: Account) -> Iterator[Draft]:
    """Prompts of every row of the source, in its order; what cannot be used carries its problem."""
    mapping = FieldMapping(dataset)
    languages = LanguageFilter(preparation.config.languages)
    converter = dataset.converter if dataset.converter != "auto" else source.converter
    for row in source.rows():
        if dataset.max_rows and account.num_rows >= dataset.max_rows:
            break
        account.num_rows += 1
        try:
            yield from _prompts_of(row, preparation, dataset, converter, mapping, languages, account)
        except RecordError as error:
            yield Draft(where=row.where, problem=error)
        except RecursionError:
            yield Draft(where=row.where, problem=RecordError("too_deep", "the row's JSON is nested too deep"))
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            # values that no rule foresaw: one row's loss, with a name, never the whole run's
            yield Draft(where=row.where, problem=RecordError("bad_value", f"{type(error).__name__}: {error}"))
    mapping.check_seen()


def _prompts_of(
    row: Row,
    preparation: Preparation,
    dataset: DatasetConfig,
    converter: str,
    mapping: FieldMapping,
    languages: LanguageFilter,
    account: Account,
) -> Iterator[Draft]:
    if row.problem is not None:
        raise row.problem
    traits = preparation.traits
    conversation = clean(
        _for_template(convert(mapping.apply(row.value), converter), dataset, traits, account.repairs),
        account.repairs,
        same_role_turns=preparation.config.same_role_turns,
        allows_system=traits.renders_system,
        allows_middle_system=traits.renders_middle_system,
    )
    cuts = prompt_cuts(conversation.messages, every_turn=dataset.every_turn)
    whole = conversation.messages[: cuts[-1]]
    tools = dump(conversation.tools)
    whole_text = dump(whole)
    texts = texts_of(whole)
    languages.check(texts)
    words = words_of(texts)
    shared = {
        "conversation": hash16(whole_text),
        "tools": tools,
        "signature": signature(words),
        "contamination": preparation.contamination.find(words),
        "where": row.where,
    }
    for turn, cut in enumerate(cuts):
        text = whole_text if cut == len(whole) else dump(whole[:cut])
        number = turn if dataset.every_turn else 0
        yield _draft(
            Conversation(messages=whole[:cut], tools=conversation.tools), text, number, shared, preparation, dataset.name, account
        )


def _for_template(
    conversation: Conversation, dataset: DatasetConfig, traits: TemplateTraits, repairs: Counter[str]
) -> Conversation:
    """The conversation as this template can hold it: tools natively, or as text where the config or the template wants it."""
    has_calls = any(message.get("tool_calls") for message in conversation.messages)
    if not conversation.tools and not has_calls:
        return conversation
    is_native = (not conversation.tools or traits.renders_tools) and (not has_calls or traits.renders_tool_calls)
    if dataset.tools == "native" and not is_native:
        raise RecordError(
            "tools_not_rendered",
            f"the chat template ignores tools; set tools of dataset {dataset.name} to text, or leave it at auto",
        )
    if dataset.tools == "text" or not is_native:
        repairs["tools_as_text"] += 1
        return as_text(conversation, keeps_tool_role=traits.renders_tool_role)
    return conversation


def _draft(
    prompt: Conversation,
    messages_text: str,
    turn: int,
    shared: dict[str, Any],
    preparation: Preparation,
    dataset: str,
    account: Account,
) -> Draft:
    columns = {
        **shared,
        "id": record_id(dataset, shared["conversation"], shared["tools"], turn),
        "prompt": hash16(messages_text, shared["tools"]),
        "messages": messages_text,
    }
    try:
        _check_control_tokens(messages_text, shared["tools"], preparation, account)
        text = preparation.renderer.render_text(prompt.messages, prompt.tools)
        if len(text) > preparation.max_prompt_tokens * _MAX_CHARS_PER_TOKEN:
            limit = preparation.max_prompt_tokens
            raise RecordError("too_long", f"{len(text)} characters, which no tokenizer puts into {limit} tokens")
        _check_long_text(text, preparation)
    except RecordError as error:
        return Draft(where=shared["where"], columns=columns, problem=error)
    return Draft(where=shared["where"], columns=columns, text=text)


def _check_long_text(text: str, preparation: Preparation) -> None:
    """Refuse a text of a megabyte or more that cannot fit before it is encoded whole, which takes 500 bytes a token."""
    if len(text) < _LONG_CHARS:
        return
    num_tokens = 0
    for start in range(0, len(text), _PIECE_CHARS):
        num_tokens += len(preparation.renderer.encode([text[start : start + _PIECE_CHARS]])[0]) - _CUT_TOKENS
        if num_tokens > preparation.max_prompt_tokens:
            raise RecordError("too_long", f"more than {num_tokens} prompt tokens, at most {preparation.max_prompt_tokens} fit")


def _check_control_tokens(messages: str, tools: str, preparation: Preparation, account: Account) -> None:
    """Text that spells a control token becomes that token, here and on the server: a turn would end where none does."""
    token = preparation.renderer.control_token_in(messages) or preparation.renderer.control_token_in(tools)
    if not token:
        return
    if preparation.config.control_tokens == "reject":
        raise RecordError(
            "control_token",
            f"the text spells {token}, which the target reads as a control token (prompts.control_tokens is reject)",
        )
    account.repairs["control_tokens_kept"] += 1
