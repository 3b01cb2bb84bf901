"""What a client can send wrong: every answer names the place, what is wrong there, and the limit."""

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
from headway.server.http.errors import ApiError, shown
from headway.server.http.json_body import read_object
from tests.support.served import MODEL, TOOL_TEMPLATE, VOCAB_SIZE, Server, on_loop, server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


async def told(here: Server, path: str, content: bytes, status: int = 400) -> tuple[str, Any]:
    """The message and the field of an error in OpenAI's shape."""
    response = await here.client.post(path, content=content, headers=JSON)
    assert response.status_code == status, (content[:200], response.text)
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found["message"], found["param"]


# Bodies that cannot be read.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"[1, 2]", "must be a JSON object, not [1, 2]"),
        (b"null", "must be a JSON object, not null"),
        (b'"text"', 'must be a JSON object, not "text"'),
        (b'{"prompt":\n\n "a", "n": }', "expecting value at line 3, column 12 (character 23)"),
        (b'{"prompt": "a"} x', "extra data at line 1, column 17 (character 16)"),
        (b'{"prompt": "a\nb"}', "control character at line 1, column 14 (character 13)"),
        (b"{'prompt': 'a'}", "double quotes at line 1, column 2 (character 1)"),
        (b'{"prompt":\n"a\xff"}', "not UTF-8 text: 0xff at byte 13 (line 2): invalid start byte"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8 text: 0xff at byte 0 (line 1)"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested over 1000 deep"),
    ],
)
@on_loop
async def test_a_body_that_cannot_be_read_says_what_and_where(content: bytes, words: str) -> None:
    async with server() as here:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            message, param = await told(here, path, content)
            assert words in message and message.startswith("the body") and param is None


@given(st.text(min_size=1, max_size=20), st.binary(min_size=1, max_size=3), st.integers(0, 20))
def test_any_bytes_that_are_no_text_are_found_at_their_place(
    text: str, wrong: bytes, place: int
) -> None:
    before = json.dumps({"prompt": text}, ensure_ascii=False).encode("utf-8", "replace")
    content = before[:place] + wrong + before[place:]
    try:
        content.decode()
    except UnicodeDecodeError as error:
        with pytest.raises(ApiError, match=f"0x{content[error.start]:02x} at byte {error.start} "):
            read_object(content)


@given(
    st.recursive(
        st.text(max_size=5) | st.just("\ud800") | st.just("😀"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )
)
@example(["a", {"b": "x\udfff"}])
@example({"\ud800": "a"})
@example("\\ud800 is no escape here")
def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(value: Any) -> None:
    body = {"field": value}
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ApiError, match="half of a surrogate pair") as caught:
            read_object(json.dumps(body).encode())
        assert "field" in str(caught.value)
    else:
        assert read_object(json.dumps(body).encode()) == body


def test_half_of_a_surrogate_pair_is_told_with_its_place() -> None:
    body = {"messages": [{"role": "user", "content": ["a", "bc\ud83d"]}]}
    with pytest.raises(ApiError) as caught:
        read_object(json.dumps(body).encode())
    where, half = "messages[0].content[1]", r"\ud83d, half of a surrogate pair,"
    assert str(caught.value) == f"{where} holds {half} at character 2; send whole characters"
    assert caught.value.param == "messages"
    for content in (rb'{"a": "\uD800", "b": "\ud800"}', rb'{"a": ["\uDFFF", {"b": "\uD800"}]}'):
        with pytest.raises(ApiError, match=r"^a(\[0\])? holds"):  # the first of several
            read_object(content)


def test_a_number_of_thousands_of_digits_is_beyond_all_limits() -> None:
    read = read_object(b'{"n": ' + b"9" * 5000 + b', "m": -' + b"9" * 5000 + b', "k": 3}')
    assert read == {"n": float("inf"), "m": -float("inf"), "k": 3}


# Fields.

PLACES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": 3}, "prompt must be a string or a list, not 3"),
    (COMPLETIONS, {"prompt": None}, "prompt must be a string or a list, not null"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 'prompt[1] must be an integer, not "a"'),
    (COMPLETIONS, {"prompt": ["a", None]}, "prompt[1] must be a string, not null"),
    (COMPLETIONS, {"prompt": [[1], [2, True]]}, "prompt[1][1] must be an integer, not true"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1] has no tokens; at least one is needed"),
    (COMPLETIONS, {"prompt": [[1], [VOCAB_SIZE]]},
     f"prompt: token id {VOCAB_SIZE} is not a whole number of at least 0 and below {VOCAB_SIZE}"),
    (COMPLETIONS, {"prompt": ["a"] * 50, "n": 50}, "make 2500 texts; at most 2048"),
    (COMPLETIONS, {"n": 1025}, "n must be at most 1024, not 1025"),
    (COMPLETIONS, {"n": float("inf")}, "n must be an integer, not Infinity"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens must be at least 1, or 0 with echo, not -1"),
    (COMPLETIONS, {"max_tokens": 257}, "max_tokens must be at most 256, the model's length, not 257"),
    (COMPLETIONS, {"min_tokens": 10**30}, "min_tokens must be at most 256, the model's length"),
    (COMPLETIONS, {"logprobs": 101}, "logprobs must be at most 100, not 101"),
    (COMPLETIONS, {"temperature": float("nan")}, "temperature must be a number, not NaN"),
    (COMPLETIONS, {"temperature": float("inf")}, "temperature must be at most 1000, not Infinity"),
    (COMPLETIONS, {"top_p": 0}, "top_p must be above 0, not 0"),
    (COMPLETIONS, {"stream": "yes"}, 'stream must be true or false, not "yes"'),
    (COMPLETIONS, {"stop": ["a", 3]}, "stop[1] must be a string, not 3"),
    (COMPLETIONS, {"stop": ["x"] * 65}, "stop must have at most 64 items, not 65"),
    (COMPLETIONS, {"stop_token_ids": [5, "a"]}, 'stop_token_ids[1] must be an integer, not "a"'),
    (COMPLETIONS, {"stop_token_ids": [VOCAB_SIZE]},
     f"stop_token_ids has token {VOCAB_SIZE}; the model's tokens are 0 to {VOCAB_SIZE - 1}"),
    (COMPLETIONS, {"logit_bias": {"a": 1}}, 'logit_bias has the key "a"; keys are token ids'),
    (COMPLETIONS, {"logit_bias": {"5": "x"}}, 'logit_bias.5 must be a number, not "x"'),
    (COMPLETIONS, {"logit_bias": {"99999999999": 1}},
     f"logit_bias has token 99999999999; the model's tokens are 0 to {VOCAB_SIZE - 1}"),
    (COMPLETIONS, {"logit_bias": {str(n): 0 for n in range(5000)}},
     "logit_bias must have at most 4096 items, not 5000"),
    (COMPLETIONS, {"user": "x" * 513}, "user must have at most 512 characters, not 513"),
    (COMPLETIONS, {"priority": 2**31}, "priority must be at most 2147483647, not 2147483648"),
    (COMPLETIONS, {"deadline": -1}, "deadline must be at least 0, not -1"),
    (COMPLETIONS, {"deadline": 1e10}, "deadline must be at most 1000000000, not 10000000000.0"),
    (COMPLETIONS, {"deadline": float("nan")}, "deadline must be a number, not NaN"),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage must be true or false, not 1"),
    (COMPLETIONS, {"response_format": {"type": "xml"}},
     'response_format.type must be "text", "json_object" or "json_schema", not "xml"'),
    (COMPLETIONS, {"response_format": {}}, "response_format.type is missing"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}},
     "response_format.json_schema is missing"),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema must be an object, not 5"),
    (COMPLETIONS,
     {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
     "response_format: json_schema cannot be used: Invalid type: nope"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a", 1]}},
     "structured_outputs.choice[1] must be a string, not 1"),
    (COMPLETIONS, {"structured_outputs": {"json": 5}},
     "structured_outputs.json must be an object or a string, not 5"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "error: unclosed group"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "grammar": "b"}},
     "exactly one of json, regex, choice, grammar, not 2"),
    (CHAT, {"messages": []}, "messages must have at least 1 item, not 0"),
    (CHAT, {"messages": [*HELLO, 5]}, "messages[1] must be an object, not 5"),
    (CHAT, {"messages": [{"role": "", "content": "a"}]},
     "messages[0].role must have at least 1 character, not 0"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role is missing"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": {"a": 1}}]},
     'messages[1].content must be a string or a list, not {"a": 1}'),
    (CHAT, {"messages": [*HELLO * 3, {"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": 5}]}]},
     "messages[3].content[1].text must be a string, not 5"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     'messages[0].content[0].type must be "text", not "image_url"'),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 5000}}]}]},
     "messages[0].tool_calls[0].function.arguments is not JSON"),
    (CHAT, {"max_completion_tokens": 10**9}, "max_completion_tokens must be at most 256"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs must be at most 100, not 101"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"function": {"name": ["f"]}}}, "tool_choice names ['f']"),
    (CHAT, {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "nope"}}}]},
     "tools[1].function.parameters: json_schema cannot be used: Invalid type: nope"),
    (CHAT, {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "g", "parameters": {"x-guidance": 5}}}]},
     "tools[0].function.parameters: json_schema: x-guidance must be an object, not 5"),
    ("/tokenize", {"prompt": 5}, "prompt must be a string, not 5"),
    ("/detokenize", {"tokens": [1, "a"]}, 'tokens[1] must be an integer, not "a"'),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, f"token ids are from 0 to {VOCAB_SIZE - 1}"),
]  # fmt: skip
START: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": HELLO}, "/tokenize": {}, "/detokenize": {},
}  # fmt: skip


@on_loop
async def test_a_wrong_field_is_named_by_its_place_with_its_problem_and_the_limit() -> None:
    async with server(template=TOOL_TEMPLATE) as here:
        for path, wrong, words in PLACES:
            content = json.dumps({**START[path], **wrong}).encode()
            message, param = await told(here, path, content)
            assert words in message, (wrong, message)
            assert param in message.replace("[", " ").replace(".", " ").replace(":", "").split()
            assert "'cmpl-" not in message and "None" not in message
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
        elif each is not None and key != "id":  # what tools hold is not looked at here
            yield (*place, key)


@pytest.mark.parametrize("place", list(leaves(BODY)), ids=str)
@on_loop
async def test_whatever_leaf_of_a_body_is_wrong_is_found(place: tuple[str | int, ...]) -> None:
    body = deepcopy(BODY)
    at: Any = body
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = [[5]]  # fits nothing
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    async with server() as here:
        message, param = await told(here, CHAT, json.dumps(body).encode())
        assert message.startswith((f"{name} must ", f"{name}[0] must "))
        assert param == place[0]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
@settings(max_examples=50)
def test_what_is_shown_of_a_value_is_json_and_short(value: Any) -> None:
    whole = json.dumps(value, ensure_ascii=False)
    assert shown(value) == (whole if len(whole) <= 80 else f"{whole[:80]}...")


def test_showing_a_huge_value_looks_only_at_its_beginning() -> None:
    class Endless(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(50)
            raise AssertionError("nobody needs so much")

    assert shown(Endless([1])).endswith("...")


@pytest.mark.parametrize("kind", [Grammar.regex, Grammar.lark])
def test_half_of_a_surrogate_pair_is_no_grammar(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        kind("a\ud800")


# Paths, methods, headers.


@on_loop
async def test_wrong_paths_and_methods_are_told_what_there_is() -> None:
    async with server() as here:
        response = await here.client.get("/v2/nothing")
        assert response.status_code == 404 and "/v2/nothing" in response.json()["error"]["message"]
        response = await here.client.put(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 405 and response.headers["allow"] == "POST"
        message = response.json()["error"]["message"]
        assert message == 'PUT is not for "/v1/completions"; POST is'
        response = await here.client.post("/metrics", json={})
        assert (response.status_code, response.headers["allow"]) == (405, "GET")
        response = await here.post(COMPLETIONS, prompt="a", model="gpt-4o")
        assert response.status_code == 404
        message = f'the model "gpt-4o" does not exist here; models: {MODEL!r}'
        assert response.json()["error"]["message"] == message


@on_loop
async def test_a_body_that_is_not_plain_json_says_which_header_is_wrong() -> None:
    async with server(max_body_bytes=100) as here:
        wrong = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        for name, value in wrong.items():
            headers = {"Content-Type": "application/json", name: value}
            response = await here.client.post(COMPLETIONS, content=b"{}", headers=headers)
            found = response.json()["error"]
            assert (response.status_code, found["param"]) == (415, name)
            assert value in found["message"]
        message, _ = await told(here, COMPLETIONS, b" " * 101, 413)
        assert "larger than 100 bytes" in message
