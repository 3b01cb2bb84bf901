"""Reasoning over HTTP: apart from the answer in every API, complete and streamed, with exact counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.outputs import Delta
from headway.sampling_params import TokenLogprobs
from headway.server.generation.output_parser import ReasoningOutputParser, TokenKinds
from headway.server.toolcalls.choice import tool_use
from headway.server.toolcalls.formats import CallDelta, merge_pieces, merge_reasoning
from headway.text.detokenizer import Detokenizer
from headway.text.harmony import TAGS
from headway.text.reasoning import reasoning_of
from tests.support.served import END, TOOL_TEMPLATE, Server, letters, with_server
from tests.support.waiting import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "?"}]
THINK = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.reasoning_content or '' }}"
    "{{ message.content or '' }};{% endfor %}{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
OPEN = THINK + "{% if add_generation_prompt %}<think>\n{% endif %}"
SAID = b"<think>\nhm\n</think>\n\nyes"
IDS = {tag: 258 + number for number, tag in enumerate(TAGS)}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = b'<tool_call>{"name": "f", "arguments": {"t": "</think><think>"}}</tool_call>'
ARGUMENTS = {"t": "</think><think>"}


def harmony(text: str) -> list[int]:
    """The tokens of a text with harmony's tags."""
    return letters(specials=TAGS).encode(text, special=False)


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY = harmony(f"{ANALYSIS}<|channel|>final<|message|>yes")


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if "[DONE]" not in line]
    return [json.loads(line) for line in lines if line]


def message_of(parts: list[dict[str, Any]], choice: int = 0) -> dict[str, Any]:
    """The message that a client joins from the chunks of a stream."""
    found: dict[str, Any] = {}
    for part in parts:
        for each in part["choices"]:
            if each["index"] == choice:
                for name in ("content", "reasoning", "reasoning_content"):
                    found[name] = found.get(name, "") + (each["delta"].get(name) or "")
    return found


@pytest.mark.parametrize("parser", ["qwen3", "auto", "deepseek_r1"])
@pytest.mark.parametrize("said", [SAID, b"<think></think>yes", b"<think>never ends"])
def test_a_chat_has_the_reasoning_beside_the_answer(parser: str, said: bytes) -> None:
    @with_server(template=THINK, reasoning_parser=parser)
    async def run(here: Server) -> None:
        here.executor.says = said
        whole = (await here.post(CHAT, messages=TALK)).json()
        message = whole["choices"][0]["message"]
        thought, _, answer = said.removeprefix(b"<think>").decode().partition("</think>")
        assert message["reasoning"] == message["reasoning_content"] == (thought.strip() or None)
        assert message["content"] == (answer.strip() or None)
        details = whole["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len(said) - len(answer) + (not answer)}
        options = {"include_usage": True}
        stream = await here.post(CHAT, messages=TALK, stream=True, stream_options=options)
        parts = chunks(stream.text)
        joined = message_of(parts)
        assert joined == {name: message[name] or "" for name in joined}
        assert parts[-1]["usage"] == whole["usage"] and "think>" not in stream.text

    run()


@with_server(template=OPEN, reasoning_parser="qwen3", max_model_len=512)
async def test_a_stream_that_ends_early_has_no_reasoning_as_content(here: Server) -> None:
    here.executor.says = b"hm, hm</think>yes"
    for more in ({"max_tokens": 3}, {"max_tokens": 10}, {"stop": ","}, {"stop": "hm"}):
        whole = (await here.post(CHAT, messages=TALK, **more)).json()["choices"][0]
        assert whole["message"]["content"] is None, more
        stream = chunks((await here.post(CHAT, messages=TALK, stream=True, **more)).text)
        assert message_of(stream)["content"] == ""
        assert message_of(stream)["reasoning"] == (whole["message"]["reasoning"] or "")
        assert "hm, hm".startswith(message_of(stream)["reasoning"][:6])
    here.executor.num_free_steps = 4
    stopped = here.client.post(CHAT, json={"messages": TALK, "stream": True})
    task = asyncio.ensure_future(stopped)
    await until(lambda: here.executor.is_blocked)
    here.executor.fault = RuntimeError("the device was lost")
    text = (await task).text
    *parts, last = chunks(text)
    assert "error" in last and message_of(parts)["content"] == ""
    assert message_of(parts)["reasoning"]


@with_server(template=THINK)
async def test_without_a_parser_nothing_changes(here: Server) -> None:
    here.executor.says = SAID
    body = (await here.post(CHAT, messages=TALK)).json()
    message = {"role": "assistant", "content": SAID.decode(), "refusal": None}
    assert body["choices"][0]["message"] == message
    assert "completion_tokens_details" not in body["usage"]
    for path, fields in ((RESPONSES, {"input": "?"}), (MESSAGES, MESSAGE)):
        text = (await here.post(path, **fields)).text
        assert "<think>" in text and "reasoning_text" not in text and "thinking" not in text


MESSAGE: dict[str, Any] = {"model": "letters", "max_tokens": 200, "messages": TALK}


@with_server(template=THINK, reasoning_parser="qwen3")
async def test_a_model_that_does_not_reason_is_unchanged(here: Server) -> None:
    here.executor.says = b"\n yes </think> "
    (choice,) = (await here.post(CHAT, messages=TALK)).json()["choices"]
    assert choice["message"]["content"] == "\n yes </think> "
    assert choice["message"]["reasoning"] is None


@with_server(template=TOOL_TEMPLATE + "<think>", reasoning_parser="qwen3")
async def test_calls_are_parsed_after_the_reasoning_only(here: Server) -> None:
    thought = 'f? <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    here.executor.says = thought.encode() + b"</think>Well. " + CALL + b"</think>"
    (choice,) = (await here.post(CHAT, messages=TALK, tools=[TOOL])).json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (thought, "Well.</think>")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


@with_server(template="<tool_call>", reasoning_parser="gpt_oss", specials=TAGS)
async def test_harmony_channels_over_all_apis(here: Server) -> None:
    here.executor.says = HARMONY
    chat = (await here.post(CHAT, messages=TALK, n=2)).json()
    for choice in chat["choices"]:
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("yes", "hm")
    num_reasoning = len(harmony("<|channel|>analysis<|message|>hm<|end|>"))
    assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}
    stream = chunks((await here.post(CHAT, messages=TALK, n=2, stream=True)).text)
    for number in range(2):
        assert message_of(stream, number)["content"] == "yes"
    here.executor.says = harmony("<|channel|>final<|message|>a <") + list(b"|channel|>analysis")
    (choice,) = (await here.post(CHAT, messages=TALK)).json()["choices"]
    assert choice["message"]["content"] == "a <|channel|>analysis", "a text is not a special token"


HARMONY_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<|start|>assistant"
)


@with_server(template=HARMONY_TOOLS, reasoning_parser="auto", specials=TAGS)
async def test_harmony_calls(here: Server) -> None:
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    here.executor.says = harmony(f'{ANALYSIS}{head}{{"t":\n"</think><think>"}}<|call|>')
    fields = {"messages": TALK, "tools": [TOOL]}
    (choice,) = (await here.post(CHAT, **fields)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    parts = chunks((await here.post(CHAT, **fields, stream=True)).text)
    calls = [each for part in parts for each in part["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "f" and calls[0]["id"].startswith("call_")
    assert "".join(each["function"]["arguments"] for each in calls) == call["function"]["arguments"]
    forced = await here.post(CHAT, **fields, tool_choice="required")
    assert forced.status_code == 400 and "tool_choice" in forced.json()["error"]["message"]


@with_server(template=THINK, reasoning_parser="qwen3", policies={"num_scheduler_steps": 22})
async def test_logprobs_are_those_of_the_answer(here: Server) -> None:
    here.executor.says = SAID
    for more in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 1, "max_tokens": 24}):
        (choice,) = (await here.post(CHAT, messages=TALK, **more)).json()["choices"]
        content = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
        parts = chunks((await here.post(CHAT, messages=TALK, stream=True, **more)).text)
        entries = []
        for part in parts:
            (each,) = part["choices"]
            found = (each["logprobs"] or {}).get("content") or []
            assert not (found and "reasoning" in each["delta"])
            entries += found
        assert entries == content


@with_server(template=THINK, reasoning_parser="qwen3")
async def test_effort_and_thinking_reach_the_template(here: Server) -> None:
    async def prompt(path: str, **fields: Any) -> str:
        here.executor.says = None  # the prompt in capitals
        body = (await here.post(path, **fields)).json()
        if path == CHAT:
            return str(body["choices"][0]["message"]["content"])
        (block,) = body["output" if path == RESPONSES else "content"]
        return str(block["text"] if path == MESSAGES else block["content"][0]["text"])

    assert await prompt(CHAT, messages=TALK, reasoning_effort="high") == "U:?;HIGH"
    off = {"enable_thinking": False}
    assert (await prompt(CHAT, messages=TALK, chat_template_kwargs=off)).endswith("<THINK></THINK>")
    assert (await prompt(CHAT, messages=TALK, reasoning_effort="none")).endswith("<THINK></THINK>")
    assert await prompt(RESPONSES, input="?", reasoning={"effort": "low"}) == "U:?;LOW"
    assert await prompt(MESSAGES, **MESSAGE, output_config={"effort": "max"}) == "U:?;MAX"
    for thinking, is_off in (({"type": "enabled", "budget_tokens": 1024}, False),
                             ({"type": "disabled"}, True), ({"type": "adaptive"}, False)):  # fmt: skip
        assert ("THINK" in await prompt(MESSAGES, **MESSAGE, thinking=thinking)) == is_off
    echo = {"role": "assistant", "content": "c", "reasoning": "r"}
    assert await prompt(CHAT, messages=[echo, *TALK]) == "A:RC;U:?;"
    blocks = [{"type": "thinking", "thinking": "r", "signature": ""}, {"type": "text", "text": "c"}]
    talk = [*TALK, {"role": "assistant", "content": blocks}, *TALK]
    assert await prompt(MESSAGES, **{**MESSAGE, "messages": talk}) == "U:?;A:RC;U:?;"
    item = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "r"}],
    }
    items = [*TALK, item, {"role": "assistant", "content": "c"}, *TALK]
    assert await prompt(RESPONSES, input=items) == "U:?;A:RC;U:?;"


cuts = st.lists(st.integers(0, 120), max_size=10)


@settings(max_examples=40, deadline=None)
@given(cuts=cuts, thought=st.text("ab <\né", max_size=6), answer=st.text("cd <\né", max_size=6),
       is_special=st.booleans())  # fmt: skip
def test_tokens_are_those_of_their_texts_in_any_division_of_a_stream(
    cuts: list[int], thought: str, answer: str, is_special: bool
) -> None:
    specials = ("<think>", "</think>") if is_special else ()
    tokenizer = letters("<think>", specials=specials)
    reasoning = reasoning_of(tokenizer, "qwen3")
    assert reasoning is not None
    use = tool_use(TOOL_TEMPLATE, [TOOL])
    assert use is not None
    tokens = tokenizer.encode(f"<think>{thought}</think>", special=False)
    num_reasoning = len(tokens)
    tokens += [*tokenizer.encode(answer + CALL.decode(), special=False), END]
    sample: list[int] = []
    kinds = TokenKinds(sample, Detokenizer(reasoning.tokenizer), {END})
    parser = ReasoningOutputParser(use.parser("s"), reasoning.splitter([]), kinds, str)
    detokenizer, pieces, logprobs = Detokenizer(reasoning.tokenizer), [], list[int]()
    places = sorted({min(place, len(tokens)) for place in cuts} | {len(tokens)})
    for start, end in zip([0, *places], places, strict=False):
        new = tokens[start:end]
        sample += new
        text = detokenizer.push([token for token in new if token != END])
        entries = [TokenLogprobs(token, 0.0, 1) for token in new if token != END]
        reason = "stop" if end == len(tokens) else None
        pieces += parser.push(Delta(0, text, entries, reason, new, len(sample)))
        logprobs += [entry.token for entry in parser.logprobs]
    parsed = merge_pieces(pieces)
    assert (merge_reasoning(pieces) or "") == thought.strip("\n") or thought.strip() == ""
    assert json.loads(parsed.calls[0].arguments) == ARGUMENTS
    assert (parsed.content or "").strip() == answer.strip()
    assert parser.num_reasoning_tokens == num_reasoning
    assert tokenizer.decode(logprobs, skip_special=False) == answer.lstrip("\n") + CALL.decode()
    assert parser.finish_reason("stop") == "tool_calls"
    assert any(isinstance(piece, CallDelta) for piece in pieces)
