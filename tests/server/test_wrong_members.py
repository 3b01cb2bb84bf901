"""Members of requests that no model validates: a wrong one is a 400 that names its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.served import MODEL, Server, server, with_server
from tests.support.waiting import on_loop

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
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
