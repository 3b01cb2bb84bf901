"""Tool calls: detection of formats, grammars, and parsing without loss of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.errors import InvalidRequest
from headway.grammar.grammar import check_grammar
from headway.server.openai.protocol import ChatRequest
from headway.server.toolcalls.choice import format_of, tool_use
from headway.server.toolcalls.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    CallDelta,
    ParsedOutput,
    ToolCall,
    ToolFormat,
    merge_pieces,
)
from headway.server.toolcalls.parser import ToolCallParser
from headway.server.toolcalls.prompt import template_messages, with_tools_described
from headway.text.chat_template import render_chat

# Templates similar to those of Qwen 2.5, Llama 3.1 and models without tools.
QWEN = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
LLAMA = """{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and \
its value}.' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
MISTRALS = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"""
XML = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
<tool_call>
<function=example_function_name>
</function>
</tool_call>"""
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

NAMES = frozenset({"weather", "no-thing"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"$ref": "#/$defs/Place"},
                "days": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            },
            "required": ["place"],
            "additionalProperties": False,
            "$defs": {"Place": {"type": "string", "maxLength": 30}},
        },
    },
}
NO_THING = {"type": "function", "function": {"name": "no-thing"}}
TOOLS = [WEATHER, NO_THING]
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}


def reader(format: ToolFormat = HERMES) -> ToolCallParser:
    numbers = iter(range(1000))
    return ToolCallParser(format, NAMES, new_id=lambda: f"call_{next(numbers)}")


def tagged(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def parse(parser: ToolCallParser, text: str) -> ParsedOutput:
    """Parse a complete output."""
    return merge_pieces([*parser.push(text), *parser.finish()])


def in_pieces(found: ToolCallParser, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """The texts, joined, and the calls of a stream."""
    parts = [part for piece in pieces for part in found.push(piece)] + found.finish()
    texts = "".join(part for part in parts if isinstance(part, str))
    return texts, merge_pieces(parts).calls


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """A text that contains calls, and the calls."""
    words = st.text('ab <>/{}"\n;é', max_size=8) | st.sampled_from(["<tool", "<tool_cal", "</"])
    values = st.text(max_size=6) | st.integers() | st.just("</tool_call>") | st.just("<tool_call>")
    arguments = st.dictionaries(st.text('xy"\n', max_size=3), values, max_size=3)
    calls = st.tuples(st.sampled_from(sorted(NAMES)), arguments)
    text, made = draw(words), []
    for call in draw(st.lists(calls, max_size=3)):
        made.append(call)
        text += tagged(*call) + draw(words)
    return text, made


@settings(max_examples=150, deadline=None)
@given(answer=answers(), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_found_in_any_split_of_a_stream(
    answer: tuple[str, list[tuple[str, Any]]], cuts: list[int]
) -> None:
    text, made = answer
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    said, calls = in_pieces(reader(), pieces)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == made
    assert [call.id for call in calls] == [f"call_{n}" for n in range(len(made))]
    for call in made:
        text = text.replace(tagged(*call), "", 1)
    assert "".join(said.split()) == "".join(text.split()), (
        "only whitespace around calls may be dropped"
    )
    assert in_pieces(reader(), list(answer[0])) == (said, calls)


@settings(max_examples=100, deadline=None)
@given(text=st.text('ab<>/_{}":, \n', max_size=40), style=st.sampled_from(sorted(FORMATS)))
def test_output_without_calls_is_unchanged(text: str, style: str) -> None:
    assert in_pieces(reader(FORMATS[style]), list(text)) == (text, [])
    whole = parse(reader(FORMATS[style]), text)
    assert whole == (text, [])


def test_text_is_streamed_at_once_unless_it_may_begin_a_call() -> None:
    stream = reader()
    assert stream.push("Let me see") == ["Let me see"]
    assert stream.push(". \n<tool") == ["."]
    assert stream.push("box>") == [" \n<toolbox>"]
    assert stream.push(" <tool_call>") == []
    begun = CallDelta(0, "", "call_0", "weather")
    assert stream.push('{"name": "weather", "arguments": {') == [begun, CallDelta(0, "{")]
    assert stream.push('"place": "R') == [CallDelta(0, '"place": "R')]
    assert stream.push('ome"}') == [CallDelta(0, 'ome"}')]
    assert stream.push("}\n</tool_call>") == []
    assert stream.push(" Done.") == [" Done."]


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "weather", "argu',
        "<tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_text_that_resembles_a_call_stays_text(said: str) -> None:
    assert parse(reader(), said) == (said, [])
    found = parse(reader(), said + " and " + tagged("no-thing", {}))
    if said.endswith("</tool_call>"):
        assert found.content == said + " and" and len(found.calls) == 1


def test_a_complete_call_without_closing_tag_is_a_call() -> None:
    found = parse(reader(), '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n')
    assert found.content is None and found.calls[0].arguments == '{"place": "Rome"}'


def test_arguments_written_as_a_string_are_unchanged() -> None:
    found = parse(reader(), tagged("weather", '{"place": "Köln"}'))
    assert found.calls[0].arguments == '{"place": "Köln"}'


def test_line_breaks_in_streamed_arguments_are_escaped() -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"place": "a\nb\\"\tc"}}</tool_call>'
    for found in (parse(reader(), said).calls, in_pieces(reader(), list(said))[1]):
        assert json.loads(found[0].arguments) == {"place": 'a\nb"\tc'}


def test_a_truncated_call_keeps_its_partial_arguments() -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"place": "Ro'
    (call,) = parse(reader(), said).calls
    assert call.arguments == '{"place": "Ro'


@pytest.mark.parametrize("style", sorted(FORMATS))
def test_a_call_that_is_cut_off_leaves_no_fragment_in_the_text(style: str) -> None:
    format = FORMATS[style]
    call = f'{{"name": "weather", "{format.arguments}": {{"place": "Rome"}}}}'
    if format.is_list:
        call = f"[{call}]"
    before = "Well." if format.open else ""
    said = f"{before} {format.open}{call}"
    start = said.index(call)
    for end in range(start + 1, len(said) + 1):
        text, calls = cut_off(reader(format), said[:end])
        assert text == before, said[:end]
        arguments = "".join(call.arguments for call in calls)
        assert '{"place": "Rome"}'.startswith(arguments)
    assert arguments == '{"place": "Rome"}'


def test_a_text_that_is_cut_off_is_unchanged() -> None:
    for said in ("a <", "<tool_call>not js", "<toolbox>"):
        assert cut_off(reader(), said) == (said, [])
    for said in ('{"name": "Ada", "par', '{"answer": 4', "{}x"):
        assert cut_off(reader(LLAMA3), said) == (said, [])
    assert cut_off(reader(), "Well. <tool_c") == ("Well.", [])
    forced = tool_use(QWEN, TOOLS, "required")
    assert forced is not None and cut_off(forced.parser(), "<") == ("", [])


def cut_off(parser: ToolCallParser, text: str) -> tuple[str, list[ToolCall]]:
    """Text and calls of an output that ended at max_tokens."""
    content, calls = merge_pieces([*parser.push(text), *parser.cut_off()])
    return content or "", calls


def test_further_members_of_a_call_are_ignored() -> None:
    call = '{"name": "weather", "arguments": {}, "id": {"a": "}"}}'
    assert in_pieces(reader(), list(f"<tool_call>{call}</tool_call>!"))[0] == "!"
    assert in_pieces(reader(LLAMA3), list(call.replace("arguments", "parameters")))[0] == ""


@pytest.mark.parametrize(
    ("said", "text", "names"),
    [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"a": 1}}]', "", ["weather"]),
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"a": 1}}, '
         '{"name": "no-thing", "arguments": {"a": 1}}]', "", ["weather", "no-thing"]),
        ('Yes. [TOOL_CALLS]weather[ARGS]{"a": 1}', "Yes.", ["weather"]),
        ('[TOOL_CALLS]weather{"a": 1}[TOOL_CALLS]no-thing{"a": 1}', "", ["weather", "no-thing"]),
        ('[TOOL_CALLS]other{"a": 1}', '[TOOL_CALLS]other{"a": 1}', []),
        ("a [TOOL_CALLS] [not json]", "a [TOOL_CALLS][not json]", []),
        ("[TOOL", "[TOOL", []),
    ],
)  # fmt: skip
def test_mistrals_lists_of_calls_are_parsed(said: str, text: str, names: list[str]) -> None:
    for pieces in ([said], list(said)):
        found, calls = in_pieces(reader(MISTRAL), pieces)
        assert (found, [call.name for call in calls]) == (text, names)
        assert all(json.loads(call.arguments) == {"a": 1} for call in calls)


def test_a_forced_list_needs_no_special_token() -> None:
    use = tool_use(MISTRALS, TOOLS, "required")
    assert use is not None
    call = '{"name": "weather", "arguments": {"place": "Rome"}}'
    for said in (f"[{call}]", f"[{call}, {call}]"):
        assert accepts(use.grammar, said)
        found = parse(use.parser(), said)
        assert found.content is None and len(found.calls) == said.count("weather")


def test_bare_json_is_a_call_only_if_it_names_a_tool() -> None:
    call = '{"name": "weather", "parameters": {"place": "Oslo"}}'
    for said in (call, f"\n{call}\n", call[:20] + call[20:]):
        said_text, calls = in_pieces(reader(LLAMA3), list(said))
        assert not said_text.strip() and len(calls) == 1
        assert json.loads(calls[0].arguments) == {"place": "Oslo"}
    assert len(parse(reader(LLAMA3), f"{call}; {call}").calls) == 2
    for text in ('{"name": "Ada", "parameters": {}}', f"Here: {call}", '{"name": "weather"', "{}x"):
        assert in_pieces(reader(LLAMA3), list(text)) == (text, [])
    after = parse(reader(LLAMA3), f"{call} and more")
    assert after.content == " and more" and len(after.calls) == 1


def test_a_call_has_openais_format() -> None:
    call = ToolCall("call_1", "weather", "{}")
    function = {"name": "weather", "arguments": "{}"}
    assert call.as_message() == {"id": "call_1", "type": "function", "function": function}
    assert CallDelta(2, "{}", "call_1", "weather").as_chunk() == {"index": 2, **call.as_message()}
    assert CallDelta(2, '"a"').as_chunk() == {"index": 2, "function": {"arguments": '"a"'}}
    parser = ToolCallParser(HERMES, NAMES)
    own = parse(parser, tagged("weather", {}) + tagged("weather", {})).calls
    assert len({call.id for call in own}) == 2 and own[0].id.startswith("call_")
    parser = ToolCallParser(MISTRAL, NAMES)
    (short,) = parse(parser, '[TOOL_CALLS][{"name": "no-thing"}]').calls
    assert len(short.id) == 9 and short.id.isalnum(), "required by templates of Mistral's models"


def test_the_call_format_is_detected_in_the_template() -> None:
    assert format_of(QWEN) == (HERMES, False) and format_of(LLAMA) == (LLAMA3, False)
    assert format_of(MISTRALS) == (MISTRAL, False)
    with pytest.raises(InvalidRequest, match=r"tools .*--tool-call-parser hermes"):
        format_of(PLAIN)
    with pytest.raises(
        InvalidRequest, match=r"tools .*--tool-call-parser .*hermes, qwen, llama3, mistral"
    ):
        format_of(XML)
    assert format_of(XML, "hermes") == (HERMES, False) and format_of(PLAIN, "qwen")[1]
    with pytest.raises(InvalidRequest, match="tools .* no chat template"):
        format_of(None)


def test_tool_choice_none_shows_no_tools() -> None:
    for template in (QWEN, LLAMA, PLAIN, None):
        assert tool_use(template, None) is None and tool_use(template, [], "auto") is None
        assert tool_use(template, TOOLS, "none") is None


def test_auto_shows_the_tools_without_a_grammar() -> None:
    for choice in (None, "auto"):
        use = tool_use(QWEN, TOOLS, choice)
        assert use is not None and use.grammar is None
        shown = render_chat(QWEN, [{"role": "user", "content": "?"}], tools=use.tools)
        assert "The weather of a place" in shown and "no-thing" in shown
        assert parse(use.parser(), tagged("weather", {})).calls[0].name == "weather"


def accepts(grammar: Any, text: str) -> bool:
    """Whether a whole text satisfies a grammar."""
    from llguidance import LLMatcher, LLTokenizer

    check_grammar(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and (
        matcher.is_accepting()
    )


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_required_allows_only_calls_of_the_tools(template: str) -> None:
    pytest.importorskip("llguidance")
    use = tool_use(template, TOOLS, "required")
    assert use is not None

    def call(name: str, arguments: Any) -> str:
        written = f'{{"name": "{name}", "{use.format.arguments}": {json.dumps(arguments)}}}'
        return f"{use.format.begin}{written}{use.format.end}"

    rome = call("weather", {"place": "Rome", "days": [1, 1]})
    assert accepts(use.grammar, rome) and parse(use.parser(), rome).calls[0].name == "weather"
    assert accepts(use.grammar, call("no-thing", {}))
    for wrong in ("", "Hello", call("other", {}), call("weather", {}), call("no-thing", {"x": 1})):
        assert not accepts(use.grammar, wrong)
    assert not accepts(use.grammar, call("weather", {"place": 3}))
    both = rome + use.format.between + rome
    assert accepts(use.grammar, both) == (use.format == HERMES)
    one = tool_use(template, TOOLS, "required", parallel=False)
    assert one is not None and not accepts(one.grammar, both) and accepts(one.grammar, rome)


def test_strict_tools_allow_only_named_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    more = tagged("weather", {"a": 1, "b": 2})
    for tools, is_closed, allows in (
        ([tool], False, True), ([strict], False, False), ([tool], True, False),
    ):  # fmt: skip
        use = tool_use(QWEN, tools, "required", disable_additional_properties=is_closed)
        assert use is not None and accepts(use.grammar, more) == allows
        assert accepts(use.grammar, tagged("weather", {"a": 1}))


def test_a_named_choice_allows_one_call_of_that_tool() -> None:
    pytest.importorskip("llguidance")
    use = tool_use(QWEN, TOOLS, {"type": "function", "function": {"name": "no-thing"}})
    assert use is not None and len(use.tools) == 2
    assert accepts(use.grammar, tagged("no-thing", {}))
    assert not accepts(use.grammar, tagged("weather", {"place": "Rome"}))
    assert not accepts(use.grammar, tagged("no-thing", {}) + "\n" + tagged("no-thing", {}))


def test_allowed_tools_are_a_subset_of_the_shown_tools() -> None:
    use = tool_use(QWEN, TOOLS, allowed("auto", "no-thing"))
    assert use is not None and use.grammar is None and len(use.tools) == 2
    said = tagged("weather", {}) + tagged("no-thing", {})
    assert [call.name for call in parse(use.parser(), said).calls] == ["no-thing"]
    must = tool_use(QWEN, TOOLS, allowed("required", "no-thing"))
    assert must is not None and accepts(must.grammar, tagged("no-thing", {}))
    assert not accepts(must.grammar, tagged("weather", {"place": "Rome"}))


@pytest.mark.parametrize("parser", ["hermes", "qwen", "llama3", "mistral"])
def test_a_template_without_tools_gets_a_description(parser: str) -> None:
    use = tool_use(PLAIN, TOOLS, "auto", parser=parser)
    assert use is not None and use.is_described
    talk = [{"role": "user", "content": "?"}]
    shown = render_chat(PLAIN, use.messages(talk))
    assert "The weather of a place" in shown and f'"{use.format.arguments}"' in shown
    system = [{"role": "system", "content": "Be brief."}, *talk]
    described = with_tools_described(system, TOOLS, use.format)
    assert len(described) == 2 and described[0]["content"].startswith("Be brief.\n\n")


def test_earlier_calls_are_written_as_text_if_the_template_ignores_them() -> None:
    call = ToolCall("call_1", "weather", '{"place": "Rome"}').as_message()
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12 degrees", "tool_call_id": "call_1"},
    ]
    shown = render_chat(PLAIN, template_messages(PLAIN, talk))
    assert tagged("weather", {"place": "Rome"}) in shown and "12 degrees" in shown


@pytest.mark.parametrize(
    ("tools", "choice", "problem"),
    [
        (None, "required", "tool_choice .*tools"),
        (TOOLS, "always", "tool_choice .*none, auto, required.*'always'"),
        (TOOLS, {"type": "allowed_tools"}, "allowed_tools .*mode"),
        (
            TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "at least 1 tool",
        ),
        (TOOLS, allowed("auto", "x"), "tool_choice names 'x'"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, {"function": {"name": "x"}}, "tool_choice .*'x'.*: weather, no-thing"),
        ([{"type": "search"}], "auto", r"tools\[0\].type .*'function'.*'search'"),
        ([{"type": "function", "function": 5}], None, r"tools\[0\].function .*5"),
        ([{"type": "function", "function": {}}], None, r"tools\[0\].function.name .*None"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "1 to 64 letters"),
        ([WEATHER, WEATHER], None, r"tools\[1\].function.name 'weather'"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": []}}], None,
            r"tools\[0\].function.parameters .*\[\]",
        ),
    ],
)  # fmt: skip
def test_wrong_tools_and_choices_are_named(tools: Any, choice: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        tool_use(QWEN, tools, choice)


@pytest.mark.parametrize(
    ("body", "place", "kind"),
    [
        ({"tools": "weather"}, ("tools",), "list"),
        ({"tools": [WEATHER, "weather"]}, ("tools", 1), "dict"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, ("messages", 0, "tool_calls"), "list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
            ("messages", 0, "tool_calls", 0), "dict",
        ),
    ],
)  # fmt: skip
def test_tools_and_calls_of_wrong_types_are_named(
    body: dict[str, Any], place: tuple[str | int, ...], kind: str
) -> None:
    with pytest.raises(ValidationError) as found:
        ChatRequest(**{"model": "m", "messages": [{"role": "user", "content": "a"}], **body})
    (error,) = found.value.errors()
    assert error["loc"] == place and error["type"].startswith(kind)


def test_a_template_gets_arguments_as_objects() -> None:
    call = ToolCall("call_1", "weather", '{"place": "Rome"}').as_message()
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
    ]
    given_ = template_messages(QWEN, talk)
    assert given_[0] == talk[0] and given_[2] == talk[2]
    assert given_[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Rome"}
    assert call["function"]["arguments"] == '{"place": "Rome"}', "the caller's message is unchanged"
    shown = render_chat(QWEN, given_)
    assert tagged("weather", {"place": "Rome"}) in shown


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        ([{"function": {"name": "f", "arguments": "{"}}], r"tool_calls\[0\].function.arguments "),
        ([{"function": {"arguments": "{}"}}], r"messages\[0\].tool_calls\[0\].function "),
    ],
)
def test_wrong_earlier_calls_are_named(calls: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        template_messages(QWEN, [{"role": "assistant", "content": "", "tool_calls": calls}])
