"""The Responses API, the Messages API, and vLLM's additional fields."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from headway.server.generation.ignored_fields import MAX_REPORTED
from tests.support.served import CHAT_TEMPLATE, MODEL, TOOL_TEMPLATE, Server, server, with_server
from tests.support.waiting import on_loop, until

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = b'<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each must be named by its type."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def anthropic(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": HELLO, **more}


@with_server()
async def test_a_response_has_text_and_usage(here: Server) -> None:
    body = (await here.post(RESPONSES, input="hello", instructions="Be brief.")).json()
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    (item,) = body["output"]
    assert item["role"] == "assistant" and item["content"][0]["type"] == "output_text"
    assert item["content"][0]["text"] == "S:BE BRIEF.;U:HELLO;A:"
    usage = body["usage"]
    assert usage["input_tokens"] == len("s:Be brief.;u:hello;a:")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    cut = (await here.post(RESPONSES, input="hello", max_output_tokens=3)).json()
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


@with_server()
async def test_a_streamed_response_equals_the_complete_one(here: Server) -> None:
    whole = (await here.post(RESPONSES, input="hello")).json()
    events = named_events(await here.post(RESPONSES, input="hello", stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert text == whole["output"][0]["content"][0]["text"]
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@with_server(template=TOOL_TEMPLATE)
async def test_a_response_has_function_calls_complete_and_streamed(here: Server) -> None:
    here.executor.says = b"Well. " + CALL
    body = (await here.post(RESPONSES, input="?", tools=[FLAT_TOOL])).json()
    text, call = body["output"]
    assert text["content"][0]["text"] == "Well." and body["status"] == "completed"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    here.executor.seconds = 0.05  # a busy server sends several tokens in one event
    events = named_events(await here.post(RESPONSES, input="?", tools=[FLAT_TOOL], stream=True))
    kind = "response.function_call_arguments.delta"
    parts = [event["delta"] for event in events if event["type"] == kind]
    assert "".join(parts) == '{"a": 1}' and len(parts) > 1
    last = events[-1]["response"]["output"][1]
    assert last["arguments"] == '{"a": 1}' and last["call_id"].startswith("call_")


@with_server(template=CHAT_TEMPLATE)
async def test_input_items_become_messages(here: Server) -> None:
    items = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "x"}]},
        {"role": "user", "content": "r"},
    ]  # fmt: skip
    body = (await here.post(RESPONSES, input=items, max_output_tokens=200)).json()
    said = body["output"][0]["content"][0]["text"]
    assert said == 'SYSTEM:S;USER:Q;ASSISTANT:[F {"A": 1}];TOOL:7;ASSISTANT:X;USER:R;A:'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": "a", "use_beam_search": True}, "use_beam_search"),
        ({"input": "a", "echo": True}, "echo"),
    ],
)
@on_loop
async def test_wrong_and_unsupported_response_fields_are_named(fields: Any, param: str) -> None:
    async with server() as here:
        for stream in (False, True):
            response = await here.post(RESPONSES, **fields, stream=stream)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param and param in error["message"]


@with_server()
async def test_a_streamed_response_has_the_logprobs_of_text_that_was_held_back(
    here: Server,
) -> None:
    """The first letter is held back, one in the middle, and the last two, which are a stop string."""
    include = ["message.output_text.logprobs"]
    asked = {"input": "hello you", "include": include, "stop": ["UX", "LX", "YO"]}
    whole = (await here.post(RESPONSES, **asked)).json()["output"][0]["content"][0]
    assert whole["text"] == "U:HELLO "
    assert "".join(each["token"] for each in whole["logprobs"]) == "U:HELLO YO"
    events = named_events(await here.post(RESPONSES, **asked, stream=True))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == whole["logprobs"]
    assert "".join(each["delta"] for each in deltas) == whole["text"]
    assert events[-1]["response"]["output"][0]["content"][0] == whole


@with_server()
async def test_text_format_reaches_the_engine(here: Server) -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    response = await here.post(RESPONSES, input="a", text={"format": wanted})
    assert response.status_code == 200, response.text
    assert response.json()["text"]["format"]["type"] == "json_schema"


@with_server()
async def test_a_failed_response_stream_ends_with_an_error_event(here: Server) -> None:
    here.executor.num_free_steps = 3
    asked = asyncio.create_task(here.post(RESPONSES, input="a", stream=True))
    await until(lambda: here.executor.is_blocked)
    here.executor.fault = RuntimeError("lost")
    last = named_events(await asked)[-1]
    assert last["type"] == "error" and last["code"] == "step_failed"
    await here.settled()


@with_server()
async def test_a_message_has_anthropics_format(here: Server) -> None:
    body = (await here.post(MESSAGES, **anthropic(system="Be brief."))).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["content"] == [{"type": "text", "text": "S:BE BRIEF.;U:HELLO;A:"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["input_tokens"] == len("s:Be brief.;u:hello;a:")
    cut = (await here.post(MESSAGES, **anthropic(max_tokens=3))).json()
    assert cut["stop_reason"] == "max_tokens"
    stopped = (await here.post(MESSAGES, **anthropic(stop_sequences=["LL"]))).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "LL")
    assert stopped["content"][0]["text"] == "U:HE"
    again = (await here.post(MESSAGES, **anthropic(messages=HELLO * 10))).json()["usage"]
    assert again["input_tokens"] + again["cache_read_input_tokens"] == 10 * len("u:hello;") + 2


@with_server(template=TOOL_TEMPLATE)
async def test_a_streamed_message_equals_the_complete_one(here: Server) -> None:
    here.executor.says = b"Well. " + CALL
    asked = anthropic(tools=[ANTHROPIC_TOOL])
    whole = (await here.post(MESSAGES, **asked)).json()
    text, use = whole["content"]
    assert text == {"type": "text", "text": "Well."} and whole["stop_reason"] == "tool_use"
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "f", {"a": 1})
    events = named_events(await here.post(MESSAGES, **asked, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    texts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(part.get("text", "") for part in texts) == "Well."
    assert "".join(part.get("partial_json", "") for part in texts) == '{"a": 1}'
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    assert kinds.count("content_block_stop") == 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@with_server(template=CHAT_TEMPLATE)
async def test_content_blocks_become_messages(here: Server) -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "t"},
            {"type": "tool_use", "id": "u1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "u1", "content": "7"},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    asked = anthropic(messages=talk, system=[{"type": "text", "text": "s"}], max_tokens=200)
    body = (await here.post(MESSAGES, **asked)).json()
    said = 'SYSTEM:S;USER:Q;ASSISTANT:T[F {"A": 1}];TOOL:7;USER:AND?;A:'
    assert body["content"][0]["text"] == said
    counted = (await here.post(f"{MESSAGES}/count_tokens", **asked)).json()
    assert counted == {"input_tokens": len(said)}


@with_server()
async def test_a_final_assistant_message_is_continued(here: Server) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Sure"}]
    body = (await here.post(MESSAGES, **anthropic(messages=talk))).json()
    assert body["content"][0]["text"] == "U:HELLO;A:SURE"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "expected"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 2}, 400, "invalid_request_error", "temperature"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_request_error", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "messages[0].content[0]"),
        ({"thinking": {"type": "always"}}, 400, "invalid_request_error", "thinking"),
        ({"mcp_servers": [{"name": "a"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "invalid_request_error",
         "256"),
    ],
)  # fmt: skip
@with_server()
async def test_wrong_messages_requests_get_anthropics_error_format(
    here: Server, fields: Any, status: int, kind: str, expected: str
) -> None:
    for stream in (False, True):
        response = await here.post(MESSAGES, **anthropic(**fields), stream=stream)
        assert response.status_code == status, response.text
        body = response.json()
        assert body["type"] == "error" and body["error"]["type"] == kind
        assert expected in body["error"]["message"]


@on_loop
async def test_middleware_and_framework_errors_have_the_format_of_their_api() -> None:
    async with server(api_keys=("k",)) as here:
        body = (await here.post(MESSAGES, **anthropic())).json()
        assert body["error"]["type"] == "authentication_error"
        assert "param" in (await here.post(CHAT, messages=HELLO)).json()["error"]
    async with server() as here:
        assert (await here.client.get(MESSAGES)).json()["type"] == "error"


@with_server(template=TOOL_TEMPLATE)
async def test_anthropics_tool_choice_is_converted(here: Server) -> None:
    here.executor.says = CALL
    for choice, is_forced in (("auto", False), ("any", True), ("tool", True)):
        wanted = {"type": choice, **({"name": "f"} if choice == "tool" else {})}
        asked = anthropic(tools=[ANTHROPIC_TOOL], tool_choice=wanted)
        body = (await here.post(MESSAGES, **asked)).json()
        assert body["content"][0]["type"] == "tool_use", (choice, is_forced)
    none = anthropic(tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"})
    assert (await here.post(MESSAGES, **none)).json()["content"][0]["type"] == "text"


@with_server()
async def test_token_ids_are_returned_complete_and_streamed(here: Server) -> None:
    body = (await here.post(CHAT, messages=HELLO, return_token_ids=True)).json()
    assert bytes(body["prompt_token_ids"]) == b"u:hello;a:"
    tokens = body["choices"][0]["token_ids"]
    assert bytes(tokens[:-1]) == b"U:HELLO;A:" and tokens[-1] == 257
    done = await here.complete(prompt="abc", return_token_ids=True)
    assert bytes(done["choices"][0]["prompt_token_ids"]) == b"abc"
    assert bytes(done["choices"][0]["token_ids"][:-1]) == b"ABC"
    for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "abc"})):
        response = await here.post(path, **asked, stream=True, return_token_ids=True)
        lines = [line[6:] for line in response.text.split("\n\n") if line][:-1]
        chunks = [json.loads(line) for line in lines]
        streamed = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
        assert streamed == (tokens if path == CHAT else done["choices"][0]["token_ids"])
        first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
        assert bytes(first["prompt_token_ids"]) in (b"u:hello;a:", b"abc")
    plain = (await here.post(CHAT, messages=HELLO)).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


@with_server()
async def test_prompt_logprobs_have_vllms_format(here: Server) -> None:
    body = (await here.post(CHAT, messages=HELLO, prompt_logprobs=1)).json()
    found = body["prompt_logprobs"]
    assert found[0] is None and len(found) == len("u:hello;a:")
    assert found[1][str(ord(":"))] == {"logprob": -0.5, "rank": 1, "decoded_token": ":"}
    done = await here.complete(prompt="abc", prompt_logprobs=0)
    scored = done["choices"][0]["prompt_logprobs"][1:]
    assert [list(each) for each in scored] == [["98"], ["99"]]
    for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "abc"})):
        response = await here.post(path, **asked, prompt_logprobs=1, stream=True)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"


@with_server()
async def test_logprobs_can_show_token_ids(here: Server) -> None:
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    body = (await here.post(CHAT, messages=HELLO, **asked)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ord('U')}"
    done = await here.complete(prompt="a", logprobs=1, return_tokens_as_token_ids=True)
    assert done["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord('A')}"]


@with_server()
async def test_a_final_message_is_continued(here: Server) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    asked = {"messages": talk, "continue_final_message": True}
    body = (await here.post(CHAT, **asked)).json()
    assert body["choices"][0]["message"]["content"] == "U:HELLO;A:SURE, "
    both = await here.post(CHAT, **asked, add_generation_prompt=True)
    assert both.status_code == 400 and "continue_final_message" in both.text
    tokens = (await here.post("/tokenize", **asked)).json()["tokens"]
    assert bytes(tokens) == b"u:hello;a:Sure, "


@on_loop
async def test_an_assistant_message_with_calls_may_have_empty_content() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "7"}]  # fmt: skip
    joining = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
    for template in (joining, CHAT_TEMPLATE, TOOL_TEMPLATE):
        async with server(template=template) as here:
            response = await here.post(CHAT, messages=talk)
            assert response.status_code == 200, response.text


@with_server()
async def test_truncate_prompt_tokens_truncates_prompt_and_usage(here: Server) -> None:
    done = await here.complete(prompt="abcdef", truncate_prompt_tokens=2)
    assert done["choices"][0]["text"] == "EF" and done["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("use_beam_search", True, False),
        ("length_penalty", 0.5, 1.0),
        ("logits_processors", ["x"], []),
        ("chat_template", "{{ 1 }}", None),
        ("functions", [{"name": "f"}], []),
        ("modalities", ["audio"], ["text"]),
        ("guided_whitespace_pattern", " ", None),
        ("spaces_between_special_tokens", False, True),
    ],
)
@with_server()
async def test_unsupported_fields_that_change_the_output_are_refused(
    here: Server, field: str, value: Any, harmless: Any
) -> None:
    response = await here.post(CHAT, messages=HELLO, **{field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    fine = await here.post(CHAT, messages=HELLO, **{field: harmless}, store=True, metadata={})
    assert fine.status_code == 200, fine.text


def test_a_field_without_an_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    talk = {"messages": HELLO, "max_tokens": 2}
    requests = [
        (CHAT, {**talk, "temprature": 1, "temperature": 0, "modalities": ["text"]}),
        (CHAT, {**talk, "temprature": 2, "guided_regex": "a+", "store": None}),
        (COMPLETIONS, {"prompt": "a", "temprature": "sesame", "top_q": 1}),
        (RESPONSES, {"input": "a", "of_responses": 1}),
        (MESSAGES, anthropic(of_messages=1)),
        ("/v1/embeddings", {"input": "a", "of_embeddings": 1}),
    ]

    @on_loop
    async def send() -> None:
        async with server() as here:
            for path, body in requests:
                response = await here.post(path, **body)
                assert response.status_code == 200, response.text
            await here.complete(prompt="a", **{f"x{number}": 1 for number in range(1000)})

    with caplog.at_level(logging.WARNING):
        send()
    texts = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    names = ["temprature", "top_q", "of_responses", "of_messages", "of_embeddings"]
    for text, name in zip(texts, names, strict=False):
        assert f'"{name}"' in text and "sesame" not in text
    assert len(texts) == len(set(texts)) == MAX_REPORTED, "clients cannot fill the log"


@with_server()
async def test_guided_fields_are_accepted(here: Server) -> None:
    response = await here.post(CHAT, messages=HELLO, guided_choice="yes")
    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_choice"
    two = await here.post(CHAT, messages=HELLO, guided_regex="a", guided_choice=["a"])
    assert two.status_code == 400
    fine = await here.post(CHAT, messages=HELLO, guided_choice=["yes", "no"])
    assert fine.status_code == 200


@with_server()
async def test_every_chunk_can_contain_the_usage_so_far(here: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "abc"})):
        response = await here.post(path, **asked, stream=True, stream_options=options)
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] > 0


@with_server()
async def test_fingerprint_ping_and_docs(here: Server) -> None:
    body = (await here.post(CHAT, messages=HELLO)).json()
    assert body["system_fingerprint"] == here.app.state.context.fingerprint
    for method in ("GET", "POST"):
        assert (await here.client.request(method, "/ping")).status_code == 200
    docs = await here.client.get("/docs")
    policy = docs.headers["content-security-policy"]
    assert docs.status_code == 200 and "script-src 'sha256-" in policy
    assert "http://" not in docs.text and "https://" not in docs.text


@with_server()
async def test_max_tokens_limits_are_the_same_for_all_fields(here: Server) -> None:
    for path, asked in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "abc"})):
        texts = []
        for value in (-1, 0):
            response = await here.post(path, **asked, max_tokens=value)
            assert response.status_code == 400
            texts.append(response.json()["error"]["message"].replace(str(value), "N"))
        assert texts[0].count("at least 1") == texts[1].count("at least 1") == 1


LONG = "i" * 600


def result(id: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": id, "content": "sunny"}
    return {"messages": [*HELLO, {"role": "user", "content": [block]}]}


def choice(kind: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tool_choice": {"type": kind}}


def output(id: Any) -> dict[str, Any]:
    return {"input": [*HELLO, {"type": "function_call_output", "call_id": id, "output": "sunny"}]}


def call(id: Any) -> dict[str, Any]:
    named = {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}
    return {"input": [*HELLO, named]}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (MESSAGES, choice(["auto"]), "tool_choice"),
        (MESSAGES, choice({"auto": 1}), "tool_choice"),
        (MESSAGES, result(LONG), "messages[1].content[0].tool_use_id"),
        (MESSAGES, result(["c1"] * 300), "messages[1].content[0].tool_use_id"),
        (RESPONSES, output(LONG), "input[1].call_id"),
        (RESPONSES, output(5), "input[1].call_id"),
        (RESPONSES, call([LONG]), "input[1].call_id"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
@on_loop
async def test_a_wrong_member_is_a_400_that_names_its_place(
    path: str, fields: dict[str, Any], place: str, is_streamed: bool
) -> None:
    limit = {"max_tokens": 4} if path == MESSAGES else {}
    async with server() as here:
        response = await here.post(path, model=MODEL, stream=is_streamed, **fields, **limit)
        assert response.status_code == 400, response.text
        assert place in response.json()["error"]["message"]


@with_server()
async def test_null_as_the_id_of_a_call_means_that_it_is_absent(here: Server) -> None:
    response = await here.post(RESPONSES, model=MODEL, **output(None))
    assert response.status_code == 200, response.text
