"""gpt-oss's messages in every API: channels, calls, ends of outputs, and what its template demands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.server.context import reasoning_parser
from headway.server.settings import Settings
from headway.server.toolcalls.prompt import template_messages
from headway.text.chat_template import render_chat
from headway.text.harmony import TAGS
from tests.support.served import Server, letters, with_server

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# What the template of the published checkpoints requires, shorter.
TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium')
    if reasoning_effort is defined else '<|start|>system<|message|>Reasoning: medium' }}
{{- '<|end|>' }}
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + ' ' + tool.function.name }}
{%- endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if "content" in message and "<|channel|>" in message.content %}
            {{- raise_exception("tags in the content") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("both content and thinking") }}
            {%- elif message.content or message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
                {{- (message.content or message.thinking) + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
            {{- "<|message|>" + call.arguments|tojson + "<|call|>" }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content|tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""
TALK = [{"role": "user", "content": "?"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ANALYSIS, CALL_END = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|call|>"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.g <|constrain|>json<|message|>{"a": {"b": "}"}}\n...'


def harmony(text: str) -> list[int]:
    return letters(specials=TAGS).encode(text, special=False)


def serving(**settings: Any) -> Any:
    return with_server(template=TEMPLATE, specials=TAGS, max_model_len=1024, **settings)


def events(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


@serving(tool_call_parser="gpt_oss")
async def test_a_call_after_reasoning_and_a_preamble_in_all_apis(here: Server) -> None:
    """The output ends at <|call|>, whatever the model would write after it."""
    here.executor.says = harmony(f"{ANALYSIS}{PREAMBLE}{CALL}{CALL_END}<|start|>assistant{CALL}")
    fields = {"messages": TALK, "tools": TOOLS}
    (choice,) = (await here.post(CHAT, **fields)).json()["choices"]
    message, arguments = choice["message"], {"a": {"b": "}"}}
    (call,) = message["tool_calls"]
    assert (message["reasoning"], message["content"]) == ("hm", "Let me see.")
    assert (call["function"]["name"], choice["finish_reason"]) == ("g", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == arguments
    deltas = [
        part["choices"][0]["delta"]
        for part in events((await here.post(CHAT, **fields, stream=True)).text)
    ]
    said = {
        name: "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning", "content")
    }
    parts = [each["function"] for delta in deltas for each in delta.get("tool_calls") or []]
    assert said == {"reasoning": "hm", "content": "Let me see."} and parts[0]["name"] == "g"
    assert json.loads("".join(each["arguments"] for each in parts)) == arguments

    tools = [{"type": "function", **tool["function"], "parameters": {}} for tool in TOOLS]
    body = (await here.post(RESPONSES, input="?", tools=tools)).json()
    thought, text, called = body["output"]
    assert thought["content"][0]["text"] == "hm" and text["content"][0]["text"] == "Let me see."
    assert called["name"] == "g" and json.loads(called["arguments"]) == arguments
    stream = events((await here.post(RESPONSES, input="?", tools=tools, stream=True)).text)
    assert [item["type"] for item in stream[-1]["response"]["output"]] == [
        "reasoning", "message", "function_call",
    ]  # fmt: skip

    tools = [{"name": tool["function"]["name"], "input_schema": {}} for tool in TOOLS]
    asked = {"model": "letters", "max_tokens": 300, "messages": TALK, "tools": tools}
    body = (await here.post(MESSAGES, **asked)).json()
    thought, text, called = body["content"]
    assert (thought["thinking"], text["text"], called["name"]) == ("hm", "Let me see.", "g")
    assert called["input"] == arguments and body["stop_reason"] == "tool_use"
    stream = events((await here.post(MESSAGES, **asked, stream=True)).text)
    begun = [event["content_block"]["type"] for event in stream if "content_block" in event]
    assert begun == ["thinking", "text", "tool_use"]


@serving()
async def test_an_answer_is_split_without_a_flag_and_ends_at_return(here: Server) -> None:
    here.executor.says = harmony(f"{ANALYSIS}<|channel|>final<|message|>yes<|return|>no")
    (choice,) = (await here.post(CHAT, messages=TALK)).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("yes", "hm")
    assert choice["finish_reason"] == "stop"


@serving()
async def test_efforts_and_conversations_of_all_apis_reach_the_template(here: Server) -> None:
    here.executor.says = harmony("<|channel|>final<|message|>yes<|return|>")
    tokenizer = letters(TEMPLATE, specials=TAGS)

    async def prompt(path: str, **fields: Any) -> str:
        response = await here.post(path, **fields)
        assert response.status_code == 200, response.text
        return tokenizer.decode(list(here.executor.prompts[-1]), skip_special=False)

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = {**call, "id": "2", "function": {"name": "g", "arguments": "{}"}}
    talk = [
        *TALK, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ]  # fmt: skip
    found = await prompt(CHAT, messages=talk, tools=TOOLS, reasoning_effort="high")
    written = (
        "<|start|>user<|message|>?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"one"<|end|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"two"<|end|>'
        "<|start|>assistant"
    )
    assert found == f"<|start|>system<|message|>Reasoning: high<|end|>//  f//  g{written}"
    answered = {"role": "assistant", "content": "ok", "tool_calls": [], "name": None}
    found = await prompt(CHAT, messages=[*TALK, answered, *TALK])
    assert "Reasoning: medium" in found and "<|channel|>final<|message|>ok<|end|>" in found
    both = {"role": "assistant", "content": "So.", "reasoning": "hm", "tool_calls": [call]}
    assert "analysis<|message|>hm\nSo.<|end|>" in await prompt(CHAT, messages=[*TALK, both])
    items = [
        *TALK, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        *({"type": "function_call", "call_id": c["id"], **c["function"]} for c in (call, other)),
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
    ]  # fmt: skip
    assert (await prompt(RESPONSES, input=items, reasoning={"effort": "low"})).endswith(written)
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": id, "content": text}
        for id, text in (("1", "one"), ("2", "two"))
    ]
    messages = [
        *TALK,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    found = await prompt(
        MESSAGES, model="letters", max_tokens=9, messages=messages, output_config={"effort": "low"}
    )
    assert found.endswith(written) and "Reasoning: low" in found


def test_calls_are_divided_only_for_templates_that_show_one() -> None:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": id, "function": function} for id in "ab"]
    talk = [*TALK, {"role": "assistant", "content": "c", "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": id, "content": id} for id in "bac"]
    all_calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    assert len(template_messages(all_calls, talk)) == len(talk)
    found = template_messages(TEMPLATE, talk)
    shown = [
        each.get("tool_call_id") or each.get("tool_calls", [{}])[0].get("id") for each in found
    ]
    assert shown == [None, "a", "a", "b", "b", "c"]
    assert [each["content"] for each in found] == ["?", "c", "a", "", "b", "c"]


def test_the_parser_of_calls_needs_the_tags_of_harmony() -> None:
    class Processor:
        tokenizer = letters()

    with pytest.raises(ConfigError, match="gpt_oss needs the special tokens"):
        reasoning_parser(Processor, Settings(tool_call_parser="gpt_oss"))  # type: ignore[arg-type]


def test_the_prompt_of_one_that_continues_ends_with_its_text() -> None:
    last = {"role": "assistant", "content": "because"}
    found = render_chat(TEMPLATE, [*TALK, last], continue_final_message=True)
    assert found.endswith("<|start|>assistant<|channel|>final<|message|>because")
