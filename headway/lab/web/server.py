"""Serves the lab on this machine, with the standard library alone.

Only pages of this server may call it: requests with another Host or Origin are refused, so that no
other web page can run policies here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from headway.lab.web.app import LabApp, Response, json_response

MAX_BODY = 1 << 28  # bytes of an uploaded trace
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class LabServer(ThreadingHTTPServer):
    """One thread per connection."""

    daemon_threads = True

    def __init__(self, app: LabApp, host: str = "127.0.0.1", port: int = 0) -> None:
        self.app, self.host = app, host
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: a browser may close it while a recording is sent."""


class Handler(BaseHTTPRequestHandler):
    """Translates between sockets and LabApp."""

    protocol_version = "HTTP/1.1"
    server: LabServer

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True
            error = f"a body of at most {MAX_BODY} bytes with its length is needed"
            self._send(json_response(413, {"error": error}))
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        if problem := self._foreign():
            self._send(json_response(403, {"error": problem}))
            return
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        self._send(self.server.app.handle(self.command, parts.path, query, body))

    def _foreign(self) -> str:
        """Why the request does not come from a page of this server; empty if it does."""
        port = self.server.server_address[1]
        hosts = {f"{name}:{port}" for name in (*LOCAL, self.server.host)}
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in hosts:
            return f"the host {host!r} is not this server; open {self.server.url}"
        if origin is not None and origin.removeprefix("http://") not in hosts:
            return f"a page of {origin} must not use this server"
        return ""

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if not isinstance(response.body, list):
            self._stream(response.body)
            return
        data = b"".join(response.body)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: Iterable[bytes]) -> None:
        """Send pieces as they are made, each as a chunk."""
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in filter(None, body):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        finally:
            if isinstance(body, Generator):
                body.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
