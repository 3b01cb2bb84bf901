"""Log lines carry the request id, contain no secrets, and never block the server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import threading

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from headway.server.http.middleware import RequestContextMiddleware
from headway.server.process import log_setup
from headway.server.process.log_setup import setup
from tests.support.waiting import LIMIT


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines are written before a test reads them."""
    monkeypatch.setattr(log_setup, "STOP_TIMEOUT", LIMIT)


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    logging.getLogger("headway.test").info("inside", extra={"tokens": 3})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def call(headers: dict[str, str]) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(RequestContextMiddleware(hello))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.get("/v1/a%0Ab?key=sesame", headers=headers)

    return asyncio.run(get())


def test_every_line_of_a_request_has_its_id_and_no_secrets() -> None:
    file = io.StringIO()
    stop = setup("json", "info", file)
    response = call({"X-Request-Id": "mine-1", "Authorization": "Bearer sesame"})
    stop()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    ours = [line for line in lines if line["logger"].startswith("headway.")]
    assert response.headers["x-request-id"] == "mine-1"
    assert [line["request_id"] for line in ours] == ["mine-1"] * 2
    assert ours[0]["tokens"] == 3 and ours[1]["status"] == 200 and ours[1]["ms"] >= 0
    assert "sesame" not in json.dumps(ours)


def test_an_invalid_request_id_is_replaced_and_control_characters_are_escaped() -> None:
    file = io.StringIO()
    stop = setup("human", "info", file)
    response = call({"X-Request-Id": "a b; drop"})
    stop()
    (line,) = (text for text in file.getvalue().splitlines() if "info    GET" in text)
    assert "GET /v1/a\ufffdb" in line and "request_id=" in line
    assert "status=200" in line and len(re.findall(r"\b200\b", line)) == 1, (
        "the status is logged once"
    )
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


class BlockedFile(io.StringIO):
    """A file that blocks writes until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.is_late = False  # a write did not wait any longer

    def write(self, text: str) -> int:
        self.is_late |= not self.open.wait(LIMIT)
        return super().write(text)


def test_a_blocked_log_file_does_not_block_the_server() -> None:
    file = BlockedFile()
    stop = setup("human", "info", file)
    for number in range(10_500):
        logging.getLogger("headway.test").info("%d", number)
    assert not file.is_late, "logging waits for the file"
    file.open.set()
    stop()
    assert re.search(r"\d+ lines were dropped", file.getvalue())


def test_the_log_contains_tracebacks() -> None:
    file = io.StringIO()
    stop = setup("json", "info", file)
    try:
        raise OSError("disk full")
    except OSError:
        logging.getLogger("headway.test").exception("failed")
    stop()
    assert "OSError: disk full" in json.loads(file.getvalue().splitlines()[0])["exception"]
