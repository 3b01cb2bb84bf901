"""Chat templates render as in transformers; errors name the message and field."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import InvalidRequest, ModelError
from headway.text.chat_template import render_chat
from headway.text.tokenizer import tokenizer_from_gguf
from tests.text.test_tokenizer import bundled, byte_level_metadata

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
ALTERNATING = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{% set rest = messages[1:] %}{% else %}{% set system = none %}{% set rest = messages %}{% endif %}
{% for message in rest %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate: ' ~ message.role) }}
{% endif %}
{% if message.role == 'user' %}
[INST] {% if loop.first and system is not none %}<<SYS>>{{ system }}<</SYS>>{% endif %}
{{ message.content }} [/INST]{% else %} {% generation %}{{ message.content }}{{ eos_token }}
{% endgeneration %}{% endif %}{% endfor %}"""
TOOLS = """\
{% set state = namespace(calls=0) %}
{% if tools %}
Tools ({{ tools | length }}):
{% for tool in tools %}
{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2, sort_keys=true) }}
{% endfor %}
{% endif %}
{% for message in messages %}
  {% if message.role == 'developer' %}{% continue %}{% endif %}
<{{ message.role }}>{% if message.content is not none %}{{ message.content }}{% endif %}
  {% for call in message.tool_calls or [] %}
    {% set state.calls = state.calls + 1 %}
[{{ state.calls }}] {{ call.function.name }}({{ call.function.arguments | tojson }})
  {% endfor %}
  {% if state.calls > 3 %}{% break %}{% endif %}
{% endfor %}
{{ documents is defined }}{{ documents }}
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
"""
PARTS = """\
{% for message in messages %}{{ '<' ~ message['role'] ~ '>' }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}|{% endif %}
{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "tools": TOOLS, "parts": PARTS}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The <b>weather</b> & 'more' — für heute",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}  # fmt: skip
USER, ASSISTANT, SYSTEM = (
    {"role": "user", "content": " What's <this> & that?\n"},
    {"role": "assistant", "content": "Größe: 中文 \U0001f600"},
    {"role": "system", "content": "Speak plainly."},
)
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [{"type": "function", "function": {
        "name": "weather", "arguments": {"where": "Köln", "n": [1, 2.5, None, True]},
    }}],
}  # fmt: skip
IN_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two's"}],
}


@cache
def transformers_tokenizer() -> Any:
    """A transformers tokenizer; templates read its special tokens."""
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    backend = tokenizer_from_gguf(byte_level_metadata("gpt-2"))._backend
    return fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def theirs(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    found: str = transformers_tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, **more
    )
    return found


def ours(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return render_chat(template, messages, bos="<s>", eos="</s>", **more)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("chatml", [USER]),
        ("chatml", [SYSTEM, USER, ASSISTANT, USER]),
        ("alternating", [USER, ASSISTANT, USER]),
        ("alternating", [SYSTEM, USER, ASSISTANT]),
        ("tools", [SYSTEM, USER, CALL, {"role": "tool", "content": "12°"}, ASSISTANT]),
        ("tools", [{"role": "developer", "content": "x"}, CALL, CALL, CALL, CALL, USER]),
        ("parts", [SYSTEM, IN_PARTS, ASSISTANT]),
    ],
)
def test_the_prompt_equals_that_of_transformers(
    name: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    template = TEMPLATES[name]
    for more in ({}, {"tools": [WEATHER]}, {"enable_thinking": False}):
        more = {**more, "add_generation_prompt": add_generation_prompt}
        assert ours(template, messages, **more) == theirs(template, messages, **more)


@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(st.text(max_size=20), min_size=1, max_size=4),
    name=st.sampled_from(["chatml", "parts", "tools"]),
)
def test_any_content_is_rendered_as_in_transformers(contents: list[str], name: str) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    more = {"add_generation_prompt": True, "tools": [{"function": {"parameters": contents}}]}
    assert ours(TEMPLATES[name], messages, **more) == theirs(TEMPLATES[name], messages, **more)


def test_the_bundled_template_renders_as_in_transformers(smollm2: Path) -> None:
    template = bundled(smollm2).chat_template
    assert template is not None
    expected = theirs(template, [USER], add_generation_prompt=True)
    assert ours(template, [USER]) == expected
    assert expected.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert expected.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_are_joined_for_templates_without_support_for_parts(smollm2: Path) -> None:
    """transformers fails on the first template and prints a Python list with the second."""
    plain = {"role": "user", "content": "one\ntwo's"}
    printing = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in (bundled(smollm2).chat_template or "", printing):
        assert ours(template, [IN_PARTS]) == ours(template, [plain])


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    ours(CHATML, [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "x"}]}


def test_templates_can_read_the_date() -> None:
    before = datetime.now().year
    shown = int(ours("{{ strftime_now('%Y') }}", [USER]))
    assert before <= shown <= datetime.now().year


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_is_an_error(template: str | None) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render_chat(template, [USER])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ([USER, "hi"], "messages[1] is 'hi'"),
        ([{"content": "x"}], "messages[0].role is None"),
        ([USER, {"role": 3, "content": "x"}], "messages[1].role is 3"),
        ([USER, {"role": "", "content": "x"}], "messages[1].role is ''"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content is 5"),
        ([USER, {"role": "user", "content": ["x"]}], "messages[1].content[0] is 'x'"),
        ([{"role": "user", "content": [*IN_PARTS["content"], {"type": "image_url"}]}],
         "messages[0].content[2] is {'type': 'image_url'}"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] is"),
        ([{"role": "user", "content": [{"type": "file", "text": "x"}]}], "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_the_error_names_index_and_field_of_a_bad_message(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)):
        render_chat(CHATML, messages)


def test_the_error_contains_the_message_that_a_template_raises() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate: assistant"):
        ours(ALTERNATING, [ASSISTANT])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].a.b }}", "no attribute 'a'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_raises_makes_the_request_invalid(template: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        ours(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(ModelError, match="not allowed"):
        ours(template, [USER])


def test_a_syntax_error_in_a_template_is_a_model_error_with_its_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ours("fine\n{% if %}", [USER])


def test_extra_variables_reach_the_template_but_replace_no_standard_ones() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    assert ours(template, [SYSTEM], mood="!", bos_token="?") == "<s>Speak plainly.!"
