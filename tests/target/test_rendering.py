from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers.processors import TemplateProcessing

from eyas.errors import ConfigError, RecordError
from eyas.target.probe import probe_template
from eyas.target.rendering import Renderer
from tests.target.tiny_target import CHATML, KIMI, QWEN3, STRICT

MakeRenderer = Callable[..., Renderer]
_USER = {"role": "user", "content": "the question"}


def _call(arguments: object) -> dict[str, object]:
    return {"type": "function", "id": "f:0", "function": {"name": "lookup", "arguments": arguments}}


@pytest.mark.parametrize("template", [CHATML, QWEN3, KIMI])
def test_ids_equal_the_tokenizers_own(make_renderer: MakeRenderer, template: str) -> None:
    renderer = make_renderer(template)
    messages = [{"role": "system", "content": "Be brief."}, _USER, {"role": "assistant", "content": "yes"}, _USER]
    wanted = renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert renderer.render(messages).input_ids == wanted


def test_a_prompt_has_one_bos(make_renderer: MakeRenderer) -> None:
    """https://github.com/sgl-project/sglang/pull/8291: rendered text tokenized again got a second BOS."""
    renderer = make_renderer(STRICT)
    ids = renderer.render([_USER]).input_ids
    assert ids.count(renderer.tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_puts_a_bos_of_its_own_before_a_template_that_renders_one(make_renderer: MakeRenderer) -> None:
    """https://github.com/MakazhanAlpamys/Soup/issues/890: SGLang tokenizes rendered text so; ids are taken verbatim."""
    renderer = make_renderer(STRICT)
    bos = renderer.tokenizer.bos_token
    renderer.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, renderer.tokenizer.bos_token_id)]
    )
    text = renderer.tokenizer.apply_chat_template([_USER], add_generation_prompt=True, tokenize=False)
    doubled = renderer.tokenizer(text).input_ids
    ids = renderer.render([_USER]).input_ids
    assert doubled.count(renderer.tokenizer.bos_token_id) == 2, "what the engine would make of the text"
    assert ids == doubled[1:]


@pytest.mark.parametrize("template", [QWEN3, KIMI])
def test_arguments_as_text_and_as_object_give_the_same_ids(make_renderer: MakeRenderer, template: str) -> None:
    renderer = make_renderer(template)
    ids = [
        renderer.render(
            [_USER, {"role": "assistant", "content": None, "tool_calls": [_call(arguments)]}, {"role": "tool", "content": "7"}]
        )
        for arguments in ({"city": "Rome", "n": 1}, '{"city": "Rome", "n": 1}', '{"city":"Rome","n":1}')
    ]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_null_empty_and_absent_content_give_the_same_ids(make_renderer: MakeRenderer, content: str | None) -> None:
    """https://github.com/huggingface/transformers/pull/45348"""
    renderer = make_renderer(QWEN3)
    message = {"role": "assistant", "tool_calls": [_call("{}")], **({} if content == "absent" else {"content": content})}
    wanted = {"role": "assistant", "content": "", "tool_calls": [_call({})]}
    answer = {"role": "tool", "content": "7"}
    assert renderer.render([_USER, message, answer]) == renderer.render([_USER, wanted, answer])


def test_what_a_template_refuses_is_one_records_fault(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(STRICT)
    with pytest.raises(RecordError, match="must alternate") as refusal:
        renderer.render([_USER, _USER])
    assert refusal.value.reason == "template_refused"


def test_history_with_think_is_rendered_once_per_turn_and_not_by_growing_prefixes(make_renderer: MakeRenderer) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3024: such templates drop old think blocks, prefixes are no prefixes."""
    renderer = make_renderer(QWEN3)
    first = [_USER, {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}]
    short = renderer.render_text(first, adds_generation_prompt=False)
    long = renderer.render_text([*first, {"role": "user", "content": "and then"}])
    assert not long.startswith(short)  # the trap is there
    assert "<think>" not in long
    assert long.count("yes") == 1


@pytest.mark.parametrize(
    ("template", "tools", "calls", "tool_role", "middle_system"),
    [
        (CHATML, False, False, True, True),
        (QWEN3, True, True, True, True),
        (KIMI, True, True, True, True),
        (STRICT, False, False, False, False),
    ],
)
def test_probe_finds_what_a_template_ignores(
    make_renderer: MakeRenderer, template: str, tools: bool, calls: bool, tool_role: bool, middle_system: bool
) -> None:
    traits = probe_template(make_renderer(template))
    assert (traits.renders_tools, traits.renders_tool_calls, traits.renders_tool_role) == (tools, calls, tool_role)
    assert traits.renders_middle_system is middle_system
    assert traits.generation_prompt.startswith("<|im_start|>assistant\n")


def test_probe_finds_a_template_that_drops_the_system_turn(make_renderer: MakeRenderer) -> None:
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    traits = probe_template(make_renderer(template))
    assert (traits.renders_system, traits.renders_middle_system) == (False, False)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.split("{% if add_generation_prompt")[0], "add_generation_prompt"),
        (CHATML.replace("{% for", "{{ 'a' if add_generation_prompt else 'b' }}{% for", 1), "add_generation_prompt"),
        ("{{ raise_exception('no') }}", "must render a single user turn"),
    ],
)
def test_probe_refuses_templates_whose_prompts_could_not_be_right(make_renderer: MakeRenderer, template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_template(make_renderer(template))


def test_probe_refuses_a_tokenizer_that_tokenizes_otherwise_than_it_renders(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer(CHATML)
    own = type(renderer.tokenizer)

    class Overriding(own):  # type: ignore[misc, valid-type]
        def apply_chat_template(self, conversation, tokenize=True, **kwargs):
            text = super().apply_chat_template(conversation, tokenize=False, **{**kwargs, "return_dict": False})
            return self(text + "x", add_special_tokens=False)["input_ids"] if tokenize else text

    renderer.tokenizer.__class__ = Overriding
    with pytest.raises(ConfigError, match="tokenizes otherwise"):
        probe_template(renderer)
