"""Following a server: a recording, or one sentence that says why there is none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headway.errors import ConfigError
from headway.lab.recording.format import header_record
from headway.lab.web.app import LabApp
from headway.lab.web.attach import follow
from headway.record.writer import header
from headway.scheduler import preset
from tests.cli.test_cli import refused

KEY = "secret"
RECORDING = header_record(header(preset(), False), source="live")


@contextmanager
def server(status: int, body: bytes, length: int | None = None) -> Iterator[str]:
    """A server with this answer to a request with the key; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == f"Bearer {KEY}"
            self.send_response(status if is_known else 401)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body if is_known else b"")

        def log_message(self, *_: object) -> None: ...

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}"
    finally:
        found.shutdown()
        found.server_close()


def test_the_recording_of_a_server_is_passed_on() -> None:
    with server(200, RECORDING) as url:
        assert b"".join(follow(url + "/", KEY)) == RECORDING


@pytest.mark.parametrize(
    ("status", "body", "parts"),
    [
        (404, b"", ["no lab", "headway serve"]),
        (200, b"", ["no recording", "headway serve"]),  # an empty stream
        (200, b"<html>another program", ["no recording"]),
        (503, json.dumps({"error": {"message": "4 pages already follow"}}).encode(),
         ["503", "4 pages already follow"]),
        (500, b"no JSON", ["500"]),
    ],
)  # fmt: skip
def test_a_server_without_a_recording_is_refused_with_a_reason(
    status: int, body: bytes, parts: list[str]
) -> None:
    with server(status, body) as url, pytest.raises(ConfigError) as error:
        follow(url, KEY)
    assert all(part in str(error.value) for part in [url, *parts])


def test_a_server_with_a_key_asks_for_it() -> None:
    with server(200, RECORDING) as url:
        error = refused("lab", "--attach", url, "--no-open", "--port", "0")
        assert url in error and "--api-key" in error and "HEADWAY_API_KEY" in error


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ftp://here"])
def test_the_command_refuses_a_server_that_cannot_be_reached(url: str) -> None:
    error = refused("lab", "--attach", url, "--no-open")
    assert url in error and ("headway serve" in error or "http://host:8000" in error)


def test_the_page_gets_the_reason() -> None:
    with server(404, b"") as url:
        response = LabApp("attach", live=lambda: follow(url, KEY)).handle(
            "GET", "/api/live", {}, b""
        )
    assert response.status == 400 and "no lab" in json.loads(b"".join(response.body))["error"]


def test_a_connection_that_breaks_ends_the_recording() -> None:
    """The page then says that the recording has no end; what has arrived stays."""
    with server(200, RECORDING, length=len(RECORDING) + 1000) as url:
        assert b"".join(follow(url, KEY)) == RECORDING
