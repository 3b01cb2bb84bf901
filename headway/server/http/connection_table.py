"""The connections of one process: limits on their number, and a sweep that closes slow ones.

One periodic sweep compares each connection's deadline with the clock, so connections need no
timers. Knows nothing of HTTP except the error that a refused client receives.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from headway.server.http.errors import RETRY_AFTER, ApiError
from headway.server.settings import Settings

if TYPE_CHECKING:
    from headway.server.http.connection import HttpConnection

MAX_ACCEPTS = 8  # connections accepted per wakeup; limits are checked only after accepting
MAX_DEFAULT = 1 << 16  # default limit of connections, even if more descriptors are allowed
MAX_LINGERING = 16  # refused connections kept open until their clients have read the error
log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to the hard limit; return the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # some systems have a further limit that cannot be queried
            return soft
    return hard


def default_max_connections(max_descriptors: int) -> int:
    """Connections allowed by a descriptor limit; a margin remains for files and the engine."""
    if max_descriptors == resource.RLIM_INFINITY:
        return MAX_DEFAULT
    margin = max(96, max_descriptors // 8)
    return max(1, min(MAX_DEFAULT, max_descriptors - margin))


class Listener(socket.socket):
    """A listening socket that accepts at most MAX_ACCEPTS connections per wakeup.

    asyncio calls `accept` until it raises BlockingIOError. Python 3.11 continues even after an
    error such as "too many open files", and logs it two thousand times. Here an error ends the
    round.
    """

    __slots__ = ("_num_accepted",)
    max_accepts = MAX_ACCEPTS

    def accept(self) -> tuple[socket.socket, Any]:
        num_accepted = getattr(self, "_num_accepted", 0)
        self._num_accepted = 0
        if num_accepted >= self.max_accepts:
            raise BlockingIOError
        try:
            accepted = super().accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            raise  # asyncio ends the round
        except OSError:
            self._num_accepted = self.max_accepts
            raise
        self._num_accepted = num_accepted + 1
        return accepted


def log_accept_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Event loop exception handler that logs one line per accept error; asyncio retries in 1 s."""
    if str(context.get("message", "")).startswith("socket.accept()"):
        log.error("cannot accept connections: %s; retrying in 1 s", context.get("exception"))
    else:
        loop.default_exception_handler(context)


class ConnectionTable:
    """Counts connections, refuses those above the limits, and sweeps the slow ones."""

    def __init__(self, settings: Settings, max_descriptors: int) -> None:
        self.settings = settings
        self.max_connections = settings.max_connections or default_max_connections(max_descriptors)
        self._addresses: dict[HttpConnection, str] = {}  # of the admitted connections
        self._num_by_address: Counter[str] = Counter()
        self._lingering: set[HttpConnection] = set()
        self._num_refused = 0  # since the latest log line

    def admit(self, connection: HttpConnection) -> ApiError | None:
        """Count a connection; return an error if a limit is reached."""
        address = connection.client[0] if connection.client else ""
        limit = self.settings.max_connections_per_address
        if len(self._addresses) >= self.max_connections:
            problem = f"too many connections: {len(self._addresses)} (limit {self.max_connections})"
        elif limit is not None and self._num_by_address[address] >= limit:
            num_open = self._num_by_address[address]
            problem = f"too many connections from {address}: {num_open} (limit {limit})"
        else:
            self._addresses[connection] = address
            self._num_by_address[address] += 1
            return None
        self._num_refused += 1
        return ApiError(503, problem, code="too_many_connections", headers=RETRY_AFTER)

    def release(self, connection: HttpConnection) -> None:
        """Remove a connection that has ended."""
        self._lingering.discard(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._num_by_address[address] -= 1
            if not self._num_by_address[address]:
                del self._num_by_address[address]

    def may_linger(self, connection: HttpConnection) -> bool:
        """Whether a connection may stay open for LINGER seconds after its last response."""
        if connection in self._addresses:
            return True
        if len(self._lingering) >= MAX_LINGERING:
            return False
        self._lingering.add(connection)
        return True

    async def sweep(self) -> None:
        """Close slow connections periodically, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        settings, logged_at = self.settings, loop.time()
        pause = min(1.0, settings.head_timeout / 4, settings.stall_timeout / 4)
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in [*self._addresses, *self._lingering]:
                connection.expire(now)
            if self._num_refused and now - logged_at >= 1:
                log.warning("refused %d connections above the limit", self._num_refused)
                self._num_refused, logged_at = 0, now
