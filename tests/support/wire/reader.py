"""Parses the bytes of a connection with h11 as responses to its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import h11

from tests.support.wire.cases import Case


@dataclass(slots=True)
class Exchange:
    """One request on a connection and its response; `case` is None for bytes that are not HTTP."""

    case: Case | None
    raw: bytes
    version: bytes = b"1.1"
    closes: bool = False
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class Responses:
    """Parses the bytes of one connection as responses to its requests, in order."""

    def __init__(self) -> None:
        self.parser = h11.Connection(h11.CLIENT)
        self.expected: list[Exchange] = []
        self.num_done = 0
        self._num_fed = self._num_read = 0  # bytes up to the end of the latest response
        self._is_begun = False

    @property
    def num_misplaced(self) -> int:
        return self._num_fed - self._num_read

    def feed(self, data: bytes) -> None:
        """Parse bytes; b"" means the end. RemoteProtocolError if they are not HTTP."""
        self._num_fed += len(data)
        self.parser.receive_data(data)
        while self.num_done < len(self.expected):
            exchange = self.expected[self.num_done]
            if not self._is_begun:
                self._begin(exchange)
            event = self.parser.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return
            self._take(exchange, event)

    def _take(self, exchange: Exchange, event: object) -> None:
        if isinstance(event, h11.Response):
            exchange.status, exchange.headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            exchange.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            self.num_done, self._is_begun = self.num_done + 1, False
            self._num_read = self._num_fed - len(self.parser.trailing_data[0])

    def _begin(self, exchange: Exchange) -> None:
        """Give the parser the request, which determines the framing of the response."""
        if self.parser.our_state is not h11.IDLE:
            self.parser.start_next_cycle()
        method = exchange.case.method if exchange.case else "GET"
        closing = [("Connection", "close")] if exchange.closes else []
        self.parser.send(h11.Request(method=method, target="/", headers=[("Host", "a"), *closing]))
        self.parser.send(h11.EndOfMessage())
        self._is_begun = True
