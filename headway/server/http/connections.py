"""All connections of one process: how many there may be, and which are closed for being slow.

One periodic sweep compares each connection's deadline with the clock, so that a connection needs
no timer. Knows nothing of HTTP beyond the error that a refused client is sent.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

from headway.server.http.errors import ApiError
from headway.server.settings import ConnectionSettings

if TYPE_CHECKING:
    from headway.server.http.connection import Connection

MAX_ACCEPTS = 8  # connections accepted at once: the limit is checked only afterwards
MAX_DEFAULT = 1 << 16  # connections, however many descriptors the system allows
MAX_LINGERING = 16  # refused connections that are kept until their clients have read why
RETRY_AFTER = {"Retry-After": "1"}  # seconds
log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to the highest allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # a system may have a further limit that it does not tell
            return soft
    return hard


def default_max_connections(max_descriptors: int) -> int:
    """What a limit of descriptors leaves for connections; the rest is for files and the engine."""
    if max_descriptors == resource.RLIM_INFINITY:
        return MAX_DEFAULT
    margin = max(96, max_descriptors // 8)
    return max(1, min(MAX_DEFAULT, max_descriptors - margin))


class Listener(socket.socket):
    """A listening socket that gives at most MAX_ACCEPTS connections each time it is ready.

    asyncio calls `accept` until it raises BlockingIOError, in Python 3.11 even after an error such
    as "too many open files", which it then logs two thousand times. Here an error ends the round.
    """

    __slots__ = ("_num_given",)
    max_accepts = MAX_ACCEPTS

    def accept(self) -> tuple[socket.socket, Any]:
        num_given = getattr(self, "_num_given", 0)
        self._num_given = 0
        if num_given >= self.max_accepts:
            raise BlockingIOError
        try:
            accepted = super().accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            raise  # asyncio ends the round
        except OSError:
            self._num_given = self.max_accepts
            raise
        self._num_given = num_given + 1
        return accepted


def log_accept_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler: one line where accepting fails; retried after 1 s."""
    if str(context.get("message", "")).startswith("socket.accept()"):
        log.error("cannot accept connections: %s; retrying in 1 s", context.get("exception"))
    else:
        loop.default_exception_handler(context)


class ConnectionTable:
    """Counts connections, refuses those above the limits, and sweeps the slow ones."""

    def __init__(self, settings: ConnectionSettings, max_descriptors: int) -> None:
        self.settings = settings
        default = default_max_connections(max_descriptors)
        self.max_connections = settings.max_connections or default
        self._addresses: dict[Connection, str] = {}  # of the admitted ones
        self._num_by_address: Counter[str] = Counter()
        self._lingering: set[Connection] = set()
        self._num_refused = 0  # since the latest log line

    def admit(self, connection: Connection) -> ApiError | None:
        """Count a connection; an error if there are too many."""
        address = connection.client[0] if connection.client else ""
        most_of_one = self.settings.max_connections_per_address
        if len(self._addresses) >= self.max_connections:
            problem = f"too many connections: {len(self._addresses)} (limit {self.max_connections})"
        elif most_of_one is not None and self._num_by_address[address] >= most_of_one:
            num_open = self._num_by_address[address]
            problem = f"too many connections from {address}: {num_open} (limit {most_of_one})"
        else:
            self._addresses[connection] = address
            self._num_by_address[address] += 1
            return None
        self._num_refused += 1
        return ApiError(503, problem, code="too_many_connections", headers=RETRY_AFTER)

    def release(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._lingering.discard(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._num_by_address[address] -= 1
            if not self._num_by_address[address]:
                del self._num_by_address[address]

    def may_linger(self, connection: Connection) -> bool:
        """Whether a connection may stay open for a moment after its last response."""
        if connection in self._addresses:
            return True
        if len(self._lingering) >= MAX_LINGERING:
            return False
        self._lingering.add(connection)
        return True

    async def sweep(self) -> None:
        """Close slow connections, until it is cancelled."""
        loop = asyncio.get_running_loop()
        settings, logged_at = self.settings, loop.time()
        pause = min(1.0, settings.head_timeout / 4, settings.stall_timeout / 4)
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in [*self._addresses, *self._lingering]:
                connection.expire(now)
            if self._num_refused and now - logged_at >= 1:
                log.warning("refused %d connections: over the limit", self._num_refused)
                self._num_refused, logged_at = 0, now
