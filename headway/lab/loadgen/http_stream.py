"""Parsers of HTTP/1.1 responses and of server-sent events.

The result does not depend on how the network splits the bytes. Knows no sockets. Does not support
compression, which the client does not request.
"""

from __future__ import annotations


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response."""


class ConnectionLost(Exception):
    """The connection ended before the response did."""


class ResponseReader:
    """Parses one response; `feed` takes bytes and returns the part of the body in them."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_done = False
        self.stays_open = True  # the connection can be reused
        self._buffer = bytearray()
        self._is_chunked = False
        self._left: int | None = (
            0  # bytes left of the body or chunk; None: until the connection ends
        )

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        if self.status is None and not self._read_head():
            return b""
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def end(self) -> None:
        """Note the end of the connection; ConnectionLost if the response is incomplete."""
        if self.status is None or self._is_chunked or self._left is not None:
            raise ConnectionLost("the connection ended before the response did")
        self.is_done = True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise BadResponse(f"not an HTTP/1.1 response: {first[:80]!r}")
        del self._buffer[: end + 4]
        if words[1].startswith("1"):  # such as 100 Continue: the final response follows
            return self._read_head()
        fields = {name.strip().lower(): text.strip() for name, _, text in
                  (line.partition(":") for line in lines)}  # fmt: skip
        self.stays_open = words[0] == "HTTP/1.1" and fields.get("connection", "").lower() != "close"
        self._is_chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if not self._is_chunked:
            length = fields.get("content-length")
            self._left = None if length is None else _whole(length, 10)
            self.stays_open = self.stays_open and length is not None
        self.status = int(words[1])
        return True

    def _read_plain(self) -> bytes:
        taken = bytes(self._buffer[: self._left])
        del self._buffer[: len(taken)]
        if self._left is not None:
            self._left -= len(taken)
            self.is_done = self._left == 0
        return taken

    def _read_chunks(self) -> bytes:
        """A chunk is its size in hex, its bytes and a line end; a size of 0 ends the body."""
        buffer, body = self._buffer, b""
        while not self.is_done:
            if not self._left:
                end = buffer.find(b"\r\n")
                if end < 0:
                    break
                size = _whole(buffer[:end].decode("latin-1").partition(";")[0], 16)
                if size == 0:  # followed by optional trailers and an empty line
                    self.is_done = b"\r\n\r\n" in buffer
                    break
                del buffer[: end + 2]
                self._left = size + 2  # with its line end
            if len(buffer) < self._left:
                break
            body += buffer[: self._left - 2]
            del buffer[: self._left]
            self._left = 0
        return body


def _whole(text: str, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise BadResponse(f"invalid length: {text[:40]!r}")
    return number


class EventReader:
    """Parses server-sent events; `feed` returns the data of every completed event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        events: list[bytes] = []
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
