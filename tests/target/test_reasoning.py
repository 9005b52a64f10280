"""The table of cases of the reasoning split, each by token ids; expected spans are found by the test's own decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eyas.errors import ConfigError
from eyas.target.rendering import Renderer
from tests.target.tiny_target import CHATML, DEEPSEEK_R1, KIMI, OPENS_THINK, QWEN3

MakeRenderer = Callable[..., Renderer]
_CALL = '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
_TOOLS = f"<|tool_calls_section_begin|>{_CALL}<|tool_calls_section_end|>"

# reply, prompt opened think, finish reason -> reasoning, answer, tool calls (texts), closed
_CASES = {
    "opened in the prompt": ("so it is\n</think>\n\n15<|im_end|>", True, "stop", "so it is\n", "\n\n15", None, True),
    "opened by the model": ("<think>so it is</think>15<|im_end|>", False, "stop", "so it is", "15", None, True),
    "opened by the model after a blank": ("\n<think>so</think>15<|im_end|>", False, "stop", "so", "15", None, True),
    "close only": ("so it is</think>15<|im_end|>", False, "stop", "so it is", "15", None, True),
    "empty think": ("<think>\n\n</think>\n\n15<|im_end|>", False, "stop", None, "\n\n15", None, True),
    "empty think in an opened prompt": ("\n</think>\n\n15<|im_end|>", True, "stop", None, "\n\n15", None, True),
    "no close, stopped": ("42<|im_end|>", True, "stop", None, "42", None, False),
    "no close, cut by length": ("so it goes on", True, "length", "so it goes on", None, None, False),
    "opened by the model, cut by length": ("<think>so it goes", False, "length", "so it goes", None, None, False),
    "opened by the model, never closed": ("<think>so<|im_end|>", False, "stop", "so", None, None, False),
    "no think at all": ("15<|im_end|>", False, "stop", None, "15", None, False),
    "tag in the middle of an answer": (
        "the tag <think> opens<|im_end|>",
        False,
        "stop",
        None,
        "the tag <think> opens",
        None,
        False,
    ),
    "a second block belongs to the answer": (
        "a</think>b<think>c</think>d<|im_end|>",
        True,
        "stop",
        "a",
        "b<think>c</think>d",
        None,
        True,
    ),
    "nothing after the close": ("so</think>\n<|im_end|>", True, "stop", "so", None, None, True),
    "nothing at all": ("<|im_end|>", True, "stop", None, None, None, False),
    "tool calls after the close": (f"so</think>I call{_TOOLS}<|im_end|>", True, "stop", "so", "I call", _TOOLS, True),
    "tool section inside think": (f"so{_TOOLS}<|im_end|>", True, "stop", "so", None, _TOOLS, True),
    "tool section cut by length": (
        "so</think><|tool_calls_section_begin|>f",
        True,
        "length",
        "so",
        None,
        "<|tool_calls_section_begin|>f",
        True,
    ),
    "answer after the tool section": (f"so</think>{_TOOLS}done<|im_end|>", True, "stop", "so", "done", _TOOLS, True),
}


@pytest.fixture
def kimi(make_renderer: MakeRenderer) -> Renderer:
    return make_renderer(KIMI)


@pytest.mark.parametrize("case", _CASES)
def test_split(kimi: Renderer, case: str) -> None:
    reply, opens_think, finish_reason, reasoning, answer, tool_calls, is_closed = _CASES[case]
    ids = kimi.encode([reply])[0]
    offset = 11
    spans = kimi.reasoning.split(ids, opens_think, offset, finish_reason=finish_reason)

    def text(span: tuple[int, int] | None) -> str | None:
        return None if span is None else kimi.tokenizer.decode(ids[span[0] - offset : span[1] - offset])

    assert (text(spans.reasoning), text(spans.answer), text(spans.tool_calls), spans.is_closed) == (
        reasoning,
        answer,
        tool_calls,
        is_closed,
    )


def test_no_ids_give_no_spans(kimi: Renderer) -> None:
    spans = kimi.reasoning.split([], True, 5)
    assert (spans.reasoning, spans.answer, spans.tool_calls, spans.is_closed) == (None, None, None, False)


def test_tool_calls_inside_think_stay_reasoning_where_the_format_does_not_close_there(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(QWEN3)
    ids = renderer.encode(["<think>try <tool_call>x</tool_call> later</think>15<|im_end|>"])[0]
    spans = renderer.reasoning.split(ids, False)
    assert spans.tool_calls is None
    assert spans.reasoning is not None
    assert renderer.tokenizer.decode(ids[slice(*spans.reasoning)]) == "try <tool_call>x</tool_call> later"


_R1_TOOLS = "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"
_R1_CASES = {
    "opened in the prompt": ("so it is\n</think>\n\n15<|im_end|>", "stop", "so it is\n", "\n\n15", None, True),
    "the model repeats the tag": ("<think>\nso</think>15<|im_end|>", "stop", "\nso", "15", None, True),
    "empty think": ("\n\n</think>\n\n15<|im_end|>", "stop", None, "\n\n15", None, True),
    "no close, stopped": ("42<|im_end|>", "stop", None, "42", None, False),
    "cut by length inside think": ("so it goes on", "length", "so it goes on", None, None, False),
    "tool calls after the close": (f"so</think>I call{_R1_TOOLS}<|im_end|>", "stop", "so", "I call", _R1_TOOLS, True),
    "a tool section inside think does not close it": (
        f"a{_R1_TOOLS}b</think>15<|im_end|>",
        "stop",
        f"a{_R1_TOOLS}b",
        "15",
        None,
        True,
    ),
}


@pytest.mark.parametrize("case", _R1_CASES)
def test_split_of_deepseek_r1_whose_template_opens_the_block(make_renderer: MakeRenderer, case: str) -> None:
    renderer = make_renderer(DEEPSEEK_R1)
    prompt = renderer.render([{"role": "user", "content": "3 · 5?"}])
    assert prompt.opens_think
    reply, finish_reason, *expected = _R1_CASES[case]
    spans = renderer.reasoning.split(
        renderer.encode([reply])[0], prompt.opens_think, len(prompt.input_ids), finish_reason=finish_reason
    )
    whole = [*prompt.input_ids, *renderer.encode([reply])[0]]
    texts = [
        None if span is None else renderer.tokenizer.decode(whole[slice(*span)])
        for span in (spans.reasoning, spans.answer, spans.tool_calls)
    ]
    assert [*texts, spans.is_closed] == expected


def test_earlier_reasoning_that_deepseek_r1_drops_leaves_one_think_block(make_renderer: MakeRenderer) -> None:
    """Its template cuts the reasoning of earlier turns: prompt ids + output ids still hold one block, the reply's own."""
    renderer = make_renderer(DEEPSEEK_R1)
    turns = [("user", "1 + 1?"), ("assistant", "<think>\nhm\n</think>\n\n2"), ("user", "and 3 · 5?")]
    prompt = renderer.render([{"role": role, "content": text} for role, text in turns])
    output = renderer.encode(["so</think>15<|im_end|>"])[0]
    whole = renderer.tokenizer.decode([*prompt.input_ids, *output])
    assert (whole.count("<think>"), whole.count("</think>")) == (1, 1)
    spans = renderer.reasoning.split(output, prompt.opens_think)
    assert spans.reasoning is not None
    assert renderer.tokenizer.decode(output[slice(*spans.reasoning)]) == "so"


@pytest.mark.parametrize(
    ("template", "kwargs", "name", "always", "opens"),
    [
        (CHATML, {}, "none", False, False),
        (QWEN3, {}, "qwen3", True, False),
        (QWEN3, {"enable_thinking": False}, "qwen3", False, False),
        (OPENS_THINK, {}, "deepseek-r1", True, True),
        (DEEPSEEK_R1, {}, "deepseek-r1", True, True),
        (KIMI, {}, "kimi-k2", True, True),
        (KIMI, {"thinking": False}, "kimi-k2", False, False),
    ],
)
def test_format_is_found_from_tokenizer_and_template(
    make_renderer: MakeRenderer, template: str, kwargs: dict[str, bool], name: str, always: bool, opens: bool
) -> None:
    renderer = make_renderer(template, chat_template_kwargs=kwargs)
    assert (renderer.reasoning.name, renderer.reasoning.always_reasons) == (name, always)
    assert renderer.render([{"role": "user", "content": "the <think> question"}]).opens_think is opens


def test_config_overrides_what_was_found(make_renderer: MakeRenderer) -> None:
    assert make_renderer(KIMI, reasoning="none").reasoning.name == "none"
    assert make_renderer(KIMI, always_reasons="no").reasoning.always_reasons is False
    assert make_renderer(CHATML, reasoning="deepseek-r1").reasoning.name == "deepseek-r1"


def test_a_target_that_cannot_reason_is_not_said_to_always_reason(make_renderer: MakeRenderer) -> None:
    with pytest.raises(ConfigError, match="always_reasons"):
        make_renderer(CHATML, always_reasons="yes")


def test_markers_of_several_ids_split_where_the_tokenizer_has_no_single_one(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(CHATML, special=[], reasoning="deepseek-r1")
    assert len(renderer.reasoning.close_ids) > 1
    ids = renderer.encode(["<think>\nso it is\n</think>\n\n15<|im_end|>"])[0]
    spans = renderer.reasoning.split(ids, False)
    assert spans.reasoning is not None
    assert spans.answer is not None
    assert renderer.tokenizer.decode(ids[slice(*spans.reasoning)]).strip() == "so it is"
    assert renderer.tokenizer.decode(ids[slice(*spans.answer)]).strip() == "15"
