"""Error messages name the location in the body, the problem and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.errors import InvalidRequest
from headway.grammar.grammar import Grammar
from headway.server.http.errors import ApiError, format_value
from headway.server.http.json_body import parse_object
from tests.support.served import MODEL, TOOL_TEMPLATE, VOCAB_SIZE, Server, server, with_server
from tests.support.waiting import on_loop

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


async def error_of(here: Server, path: str, content: bytes, status: int = 400) -> tuple[str, Any]:
    """The message and the field of an error in OpenAI's format."""
    response = await here.client.post(path, content=content, headers=JSON)
    assert response.status_code == status, (content[:200], response.text)
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found["message"], found["param"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("empty",)),
        (b"[1, 2]", ("JSON object", "not [1, 2]")),
        (b"null", ("JSON object", "not null")),
        (b'"text"', ("JSON object", 'not "text"')),
        (b'{"prompt":\n\n "a", "n": }', ("value", "line 3, column 12 (character 23)")),
        (b'{"prompt": "a"} x', ("extra data", "line 1, column 17 (character 16)")),
        (b'{"prompt": "a\nb"}', ("control character", "line 1, column 14 (character 13)")),
        (b"{'prompt': 'a'}", ("double quotes", "line 1, column 2 (character 1)")),
        (b'{"prompt":\n"a\xff"}', ("UTF-8", "0xff at byte 13 (line 2)", "start byte")),
        ('{"prompt": "a"}'.encode("utf-16"), ("UTF-8", "0xff at byte 0 (line 1)")),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ("nested", "1000")),
    ],
)
@with_server()
async def test_errors_of_unreadable_bodies_name_problem_and_place(
    here: Server, content: bytes, expected: tuple[str, ...]
) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        message, param = await error_of(here, path, content)
        assert all(each in message for each in expected), message
        assert message.startswith("the body") and param is None


@given(st.text(min_size=1, max_size=20), st.binary(min_size=1, max_size=3), st.integers(0, 20))
def test_invalid_utf8_is_reported_with_its_position(text: str, wrong: bytes, place: int) -> None:
    before = json.dumps({"prompt": text}, ensure_ascii=False).encode("utf-8", "replace")
    content = before[:place] + wrong + before[place:]
    try:
        content.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(ApiError, match=f"0x{content[error.start]:02x} at byte {error.start} "):
            parse_object(content)


@given(
    st.recursive(
        st.text(max_size=5) | st.just("\ud800") | st.just("😀"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )
)
@example(["a", {"b": "x\udfff"}])
@example({"\ud800": "a"})
@example("\\ud800 is no escape here")
def test_a_lone_surrogate_is_refused_anywhere(value: Any) -> None:
    body = {"field": value}
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ApiError, match="lone surrogate") as caught:
            parse_object(json.dumps(body).encode())
        assert "field" in str(caught.value)
    else:
        assert parse_object(json.dumps(body).encode()) == body


def test_a_lone_surrogate_is_reported_with_its_location() -> None:
    body = {"messages": [{"role": "user", "content": ["a", "bc\ud83d"]}]}
    with pytest.raises(ApiError) as caught:
        parse_object(json.dumps(body).encode())
    expected = ("messages[0].content[1] ", "lone surrogate", r"\ud83d", "character 2")
    assert all(each in str(caught.value) for each in expected)
    assert caught.value.param == "messages"
    for content in (rb'{"a": "\uD800", "b": "\ud800"}', rb'{"a": ["\uDFFF", {"b": "\uD800"}]}'):
        with pytest.raises(ApiError, match=r"^a(\[0\])? .*surrogate"):  # the first of several
            parse_object(content)


def test_a_number_with_thousands_of_digits_is_out_of_range() -> None:
    read = parse_object(b'{"n": ' + b"9" * 5000 + b', "m": -' + b"9" * 5000 + b', "k": 3}')
    assert read == {"n": float("inf"), "m": -float("inf"), "k": 3}


# Path, wrong fields, and what the message must contain: location, value and limit.
WRONG_FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (COMPLETIONS, {"prompt": 3}, ("prompt", "a string or a list", "3")),
    (COMPLETIONS, {"prompt": None}, ("prompt", "a string or a list", "null")),
    (COMPLETIONS, {"prompt": [1, "a"]}, ("prompt[1]", "an integer", '"a"')),
    (COMPLETIONS, {"prompt": ["a", None]}, ("prompt[1]", "a string", "null")),
    (COMPLETIONS, {"prompt": [[1], [2, True]]}, ("prompt[1][1] ", "an integer", "true")),
    (COMPLETIONS, {"prompt": ["a", ""]}, ("prompt[1]", "no tokens")),
    (COMPLETIONS, {"prompt": [[1], [VOCAB_SIZE]]},
     ("prompt", str(VOCAB_SIZE))),
    (COMPLETIONS, {"prompt": ["a"] * 50, "n": 50}, ("2500", "2048", "lower n")),
    (COMPLETIONS, {"n": 1025}, ("n ", "1024", "1025")),
    (COMPLETIONS, {"n": float("inf")}, ("n ", "an integer", "Infinity")),
    (COMPLETIONS, {"max_tokens": -1}, ("max_tokens ", "at least 1", "0 with echo", "not -1")),
    (COMPLETIONS, {"max_tokens": 257}, ("max_tokens", "256", "257")),
    (COMPLETIONS, {"min_tokens": 10**30}, ("min_tokens", "256")),
    (COMPLETIONS, {"logprobs": 101}, ("logprobs", "100", "101")),
    (COMPLETIONS, {"temperature": float("nan")}, ("temperature", "a number", "NaN")),
    (COMPLETIONS, {"temperature": float("inf")}, ("temperature", "1000", "Infinity")),
    (COMPLETIONS, {"top_p": 0}, ("top_p ", "above 0", "not 0")),
    (COMPLETIONS, {"stream": "yes"}, ("stream", "true or false", '"yes"')),
    (COMPLETIONS, {"stop": ["a", 3]}, ("stop[1]", "a string", "3")),
    (COMPLETIONS, {"stop": ["x"] * 65}, ("stop", "64", "65")),
    (COMPLETIONS, {"stop_token_ids": [5, "a"]}, ("stop_token_ids[1]", "an integer", '"a"')),
    (COMPLETIONS, {"stop_token_ids": [VOCAB_SIZE]},
     ("stop_token_ids", str(VOCAB_SIZE - 1))),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, ("logit_bias", '"a"')),
    (COMPLETIONS, {"logit_bias": {"5": "x"}}, ("logit_bias.5", "a number", '"x"')),
    (COMPLETIONS, {"logit_bias": {"99999999999": 1}},
     ("logit_bias", "99999999999", str(VOCAB_SIZE - 1))),
    (COMPLETIONS, {"logit_bias": {str(n): 0 for n in range(5000)}},
     ("logit_bias", "4096", "5000")),
    (COMPLETIONS, {"user": "x" * 513}, ("user", "512", "513")),
    (COMPLETIONS, {"priority": 2**31}, ("priority", "2147483647", "2147483648")),
    (COMPLETIONS, {"deadline": -1}, ("deadline ", "at least 0", "not -1")),
    (COMPLETIONS, {"deadline": 1e10}, ("deadline", "1000000000", "10000000000.0")),
    (COMPLETIONS, {"deadline": float("nan")}, ("deadline", "a number", "NaN")),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 1}},
     ("stream_options.include_usage", "true or false", "1")),
    (COMPLETIONS, {"response_format": {"type": "xml"}},
     ("response_format.type", '"text"', '"json_object"', '"json_schema"', '"xml"')),
    (COMPLETIONS, {"response_format": {}}, ("response_format.type", "missing")),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}},
     ("response_format.json_schema", "missing")),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     ("response_format.json_schema.schema", "an object", "5")),
    (COMPLETIONS,
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
     ("response_format: json_schema", "nope")),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a", 1]}},
     ("structured_outputs.choice[1]", "a string", "1")),
    (COMPLETIONS, {"structured_outputs": {"json": 5}},
     ("structured_outputs.json", "an object or a string", "5")),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, ("structured_outputs: regex", "unclosed group")),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "grammar": "b"}},
     ("structured_outputs ", "json, regex, choice, grammar", "not regex and grammar")),
    (COMPLETIONS, {"structured_outputs": {}}, ("structured_outputs ", "not none")),
    (COMPLETIONS, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     ("structured_outputs and response_format ", "only one")),
    (COMPLETIONS, {"guided_regex": "a", "response_format": {"type": "json_object"}},
     ("guided_regex and response_format ", "only one")),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]},
     ("guided_regex and guided_choice ", "only one")),
    (CHAT, {"messages": []}, ("messages ", "at least 1", "not 0")),
    (CHAT, {"messages": [*HELLO, 5]}, ("messages[1]", "an object", "5")),
    (CHAT, {"messages": [{"role": "", "content": "a"}]},
     ("messages[0].role ", "at least 1", "not 0")),
    (CHAT, {"messages": [{"content": "a"}]}, ("messages[0].role ", "missing")),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": {"a": 1}}]},
     ("messages[1].content ", "a string or a list", 'not {"a": 1}')),
    (CHAT, {"messages": [*HELLO * 3, {"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": 5}]}]},
     ("messages[3].content[1].text ", "a string", "not 5")),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     ("messages[0].content[0].type ", '"text"', 'not "image_url"')),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 5000}}]}]},
     ("messages[0].tool_calls[0].function.arguments ", "not JSON")),
    (CHAT, {"max_completion_tokens": 10**9}, ("max_completion_tokens", "256")),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, ("top_logprobs", "100", "101")),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"function": {"name": ["f"]}}}, ("tool_choice ", "['f']")),
    (CHAT, {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "nope"}}}]},
     ("tools[1].function.parameters: json_schema", "nope")),
    (CHAT, {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "g", "parameters": {"x-guidance": 5}}}]},
     ("tools[0].function.parameters: json_schema: x-guidance", "an object", "not 5")),
    ("/tokenize", {"prompt": 5}, ("prompt", "a string", "5")),
    ("/tokenize", {}, ("prompt is missing", "messages")),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, ("prompt and messages ", "only one")),
    ("/detokenize", {"tokens": [1, "a"]}, ("tokens[1]", "an integer", '"a"')),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, ("tokens ", f"0 to {VOCAB_SIZE - 1}", str(VOCAB_SIZE))),
]  # fmt: skip
START: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": HELLO}, "/tokenize": {}, "/detokenize": {},
}  # fmt: skip


@with_server(template=TOOL_TEMPLATE)
async def test_a_wrong_field_is_reported_with_location_problem_and_limit(here: Server) -> None:
    for path, wrong, expected in WRONG_FIELDS:
        content = json.dumps({**START[path], **wrong}).encode()
        message, param = await error_of(here, path, content)
        assert all(each in message for each in expected), (wrong, message)
        assert param in message.replace("[", " ").replace(".", " ").replace(":", "").split()
        assert "'cmpl-" not in message and "None" not in message
    await here.settled()


@with_server(max_choices=3)
async def test_the_error_for_too_many_choices_names_n_its_value_and_the_limit(here: Server) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        message, param = await error_of(here, path, json.dumps({**fields, "n": 4}).encode())
        assert param == "n" and message.startswith("n must be at most 3 ") and "not 4" in message
    await here.settled()


RESPONSES_INPUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"type": "function_call", "name": 5, "arguments": "{}"}, ("input[0].name ", "not 5")),
    ({"type": "function_call", "name": "f"}, ("input[0].arguments ", "not null")),
    ({"role": "user", "content": 5}, ("input[0].content ", "list of parts", "not 5")),
]


@with_server()
async def test_a_wrong_input_item_is_reported_with_member_and_value(here: Server) -> None:
    for item, expected in RESPONSES_INPUTS:
        body = json.dumps({"input": [item]}).encode()
        message, param = await error_of(here, "/v1/responses", body)
        assert param == "input" and all(each in message for each in expected), message
    await here.settled()


BODY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "a", "name": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "tool_calls": [{"id": "e"}], "content": None},
    ],
    "stop": ["f", "g"],
    "logit_bias": {"1": 1.5, "2": -1},
    "stop_token_ids": [1, 2, 3],
    "stream": True,
    "stream_options": {"include_usage": False},
    "response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {}}},
    "structured_outputs": {"choice": ["h", "i"]},
    "n": 2,
    "temperature": 0.5,
    "user": "j",
}


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        if isinstance(each, dict | list) and each:
            yield from leaves(each, (*place, key))
        elif each is not None and key != "id":  # the content of tools is validated elsewhere
            yield (*place, key)


@pytest.mark.parametrize("place", list(leaves(BODY)), ids=str)
@on_loop
async def test_any_wrong_leaf_of_a_body_is_located(place: tuple[str | int, ...]) -> None:
    body = deepcopy(BODY)
    at: Any = body
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = [[5]]  # wrong for every field
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    async with server() as here:
        message, param = await error_of(here, CHAT, json.dumps(body).encode())
        assert message.startswith((f"{name} must ", f"{name}[0] must "))
        assert param == place[0]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
@settings(max_examples=50)
def test_a_value_is_shown_as_short_json(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False)
    assert format_value(value) == (whole if len(whole) <= 80 else f"{whole[:80]}...")


def test_showing_a_huge_value_is_fast() -> None:
    class Endless(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(50)
            raise AssertionError("the whole value was read")

    assert format_value(Endless([1])).endswith("...")


@pytest.mark.parametrize("kind", [Grammar.regex, Grammar.lark])
def test_a_grammar_with_a_lone_surrogate_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        kind("a\ud800")


@with_server()
async def test_wrong_paths_and_methods_name_the_right_ones(here: Server) -> None:
    response = await here.client.get("/v2/nothing")
    assert response.status_code == 404 and "/v2/nothing" in response.json()["error"]["message"]
    response = await here.client.put(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    message = response.json()["error"]["message"]
    assert all(each in message for each in ("PUT", "/v1/completions", "POST"))
    response = await here.client.post("/metrics", json={})
    assert (response.status_code, response.headers["allow"]) == (405, "GET")
    response = await here.post(COMPLETIONS, prompt="a", model="gpt-4o")
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert "gpt-4o" in message and MODEL in message


@with_server(max_body_bytes=100)
async def test_a_wrong_body_header_is_named(here: Server) -> None:
    wrong = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
    for name, value in wrong.items():
        headers = {"Content-Type": "application/json", name: value}
        response = await here.client.post(COMPLETIONS, content=b"{}", headers=headers)
        found = response.json()["error"]
        assert (response.status_code, found["param"]) == (415, name)
        assert value in found["message"]
    message, _ = await error_of(here, COMPLETIONS, b" " * 101, 413)
    assert "larger than 100 bytes" in message
