"""Bytes on the wire: every connection carries a sequence of complete responses.

Real sockets are read with h11, because a client library would hide stray bytes.
`python -m tests.support.wire.fuzz --conversations 2000` runs more of these random exchanges.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest

from tests.support.processes import Server
from tests.support.waiting import wait_until
from tests.support.wire.answers import answer, streamed_answer
from tests.support.wire.cases import CHAT, COMPLETIONS, TOOLS, Case
from tests.support.wire.fuzz import Conversation, Fuzz, written
from tests.support.wire.reader import Exchange
from tests.support.wire.server import SLOWLY, saying

CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Paris </tool_call>"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def here() -> Iterator[Server]:
    with Server(factory="tests.support.wire.server:wire_factory") as server:
        yield server


def chat_case(output: str, **fields: object) -> Case:
    messages = [{"role": "user", "content": saying(output)}]
    return Case(CHAT, {"messages": messages, **fields}, is_streamed=True)


def hold(here: Server, *groups: list[Exchange]) -> list[Exchange]:
    """Send groups of requests on one connection, and read all responses."""
    conversation = Conversation(here.port, random.Random(0), list(groups))
    conversation._leaves_at = None
    asyncio.run(conversation.hold())
    assert not conversation.responses.num_misplaced
    assert conversation.responses.num_done == len(conversation.responses.expected)
    return conversation.responses.expected


def raw(case: Case, *lines: str, version: str = "1.1") -> Exchange:
    """A minimal request with additional header lines."""
    head = [f"{case.method} {case.path} HTTP/{version}", "Host: 127.0.0.1", *lines]
    head += [f"Content-Type: {case.kind}", f"Content-Length: {len(case.body)}", "", ""]
    closes = version == "1.0" or "Connection: close" in lines
    whole = "\r\n".join(head).encode() + case.body
    return Exchange(case, whole, version.encode(), closes)


def test_random_exchanges_get_the_same_responses_as_alone(here: Server) -> None:
    report = asyncio.run(Fuzz(here.port, seed=1).run(70))
    assert not report.problems, report.problems[:3]
    assert report.num_misplaced == 0 and report.num_responses > 120


@pytest.mark.parametrize("output", [CALL, f"Well.\n\n{CALL}\n{CALL}", "a <tool_call and no more"])
def test_held_back_text_does_not_end_a_stream(here: Server, output: str) -> None:
    case = chat_case(output, tools=TOOLS)
    first, second = hold(here, [raw(case)], [raw(chat_case("next"))])
    [choice] = streamed_answer(200, first.body).choices.values()
    calls = [json.loads(call["arguments"]) for call in choice["calls"]]
    assert calls == [{"place": "Paris </tool_call>"}] * output.count(CALL)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert streamed_answer(200, second.body).choices[0]["text"] == "next"


def test_http_1_0_gets_no_chunks(here: Server) -> None:
    case = Case(COMPLETIONS, {"prompt": saying("plain"), "max_tokens": 9}, is_streamed=True)
    [exchange] = hold(here, [raw(case, "Expect: 100-continue", version="1.0")])
    assert b"transfer-encoding" not in exchange.headers
    # The default of HTTP/1.0. Only later versions of uvicorn send the header.
    assert exchange.headers.get(b"connection", b"close") == b"close"
    assert streamed_answer(200, exchange.body).choices[0]["text"] == "plain"


@pytest.mark.parametrize(
    "broken",
    [
        b"\x00 nonsense\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nNo Colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * (200 << 10),
    ],
    ids=["no HTTP", "header", "chunk", "length"],
)
def test_a_malformed_request_is_refused_after_earlier_responses(
    here: Server, broken: bytes
) -> None:
    stream = raw(chat_case("a stream of some length"))
    garbage = Exchange(None, broken, closes=True)
    first, second, last = hold(here, [stream, raw(chat_case("another")), garbage])
    assert streamed_answer(200, first.body).choices[0]["text"] == "a stream of some length"
    assert streamed_answer(200, second.body).choices[0]["text"] == "another"
    assert last.status == 400 and answer(400, last.body).rest["error"]["message"]


def test_an_http_2_upgrade_is_ignored(here: Server) -> None:
    offer = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAAB",
    )
    case = Case(COMPLETIONS, {"prompt": saying("upgrade: no"), "max_tokens": 20})
    found = hold(here, [raw(case, *offer), raw(case, *offer)], [raw(case)])
    assert [answer(each.status, each.body).choices[0]["text"] for each in found] == [
        "upgrade: no"
    ] * 3


def test_a_malformed_body_is_refused_at_once(here: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    [exchange] = hold(here, [Exchange(None, head + b"5\r\nabcde\r\nzz\r\n", closes=True)])
    assert exchange.status == 400


def test_a_disconnect_cancels_all_pipelined_requests(here: Server) -> None:
    """uvicorn itself notifies only the latest request of a connection."""
    prompt = 10 * SLOWLY + saying("x" * 2000)  # 200 seconds
    long = raw(Case(COMPLETIONS, {"prompt": prompt, "max_tokens": 2000}).streamed())
    conversation = Conversation(here.port, random.Random(0), [[long, long]])
    conversation._leaves_at = 2000
    asyncio.run(conversation.hold())
    assert conversation.has_left
    wait_until(lambda: num_open(here) == 0)


def num_open(here: Server) -> int:
    [found] = hold(here, [written(Case("/load", method="GET"), random.Random(1), is_last=False)])
    return int(answer(200, found.body).rest["server_load"])
