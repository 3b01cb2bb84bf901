"""Logs as lines, for people or as JSON, each with the id of the request it belongs to.

Lines are written by a thread of their own: a slow disk or a full pipe holds up neither the engine
nor a response; what does not fit in the queue is dropped and counted. Headers, query strings and
bodies are never logged, so neither keys nor prompts are.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import Full, Queue
from threading import Thread
from typing import IO, Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Form = Literal["human", "json"]
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
MAX_QUEUED = 10_000  # lines
GRACE = 2.0  # seconds for the last lines to be written
PLAIN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
OWN = frozenset(vars(logging.makeLogRecord({})))  # what every record has; the rest was added
access_log = logging.getLogger("headway.access")
NO_LINES = ("/health", "/metrics", "/live")  # asked all the time


def setup(
    form: Form = "human", level: str = "INFO", file: IO[str] | None = None
) -> Callable[[], None]:
    """Log everything to a file, stderr if none is given; call what it returns to end that."""
    stream = logging.StreamHandler(file or sys.stderr)
    stream.setFormatter(JsonLines() if form == "json" else HumanLines())
    queue: Queue[logging.LogRecord | None] = Queue(MAX_QUEUED)

    def write() -> None:
        while (record := queue.get()) is not None:
            stream.handle(record)

    writer, inlet, root = (
        Thread(target=write, name="log", daemon=True),
        Inlet(queue),
        logging.getLogger(),
    )
    level_before = root.level
    root.addHandler(inlet)
    root.setLevel(level.upper())
    writer.start()

    def stop() -> None:
        root.removeHandler(inlet)
        root.setLevel(level_before)
        with suppress(Full):  # whoever takes nothing even now is not waited for
            queue.put(None, timeout=GRACE)
            writer.join(GRACE)
        if inlet.num_dropped and not writer.is_alive():
            stream.handle(_dropped(inlet.num_dropped))

    return stop


class Inlet(QueueHandler):
    """Puts records into the queue, with the request's id, while there is room."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if not hasattr(record, "request_id") and (id := REQUEST_ID.get()):
            record.request_id = id
        return record  # as it is: it stays in this process

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.num_dropped += 1


def _dropped(count: int) -> logging.LogRecord:
    words = f"{count} lines were dropped: they came faster than they could be written"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, words, None, None)


def _added(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in OWN}


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **_added(record),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanLines(logging.Formatter):
    """Time, level, message, then whatever else is known as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        more = "".join(f"  {key}={value}" for key, value in _added(record).items())
        line = f"{stamp} {record.levelname.lower():<7} {record.getMessage()}{more}"
        line = "".join(c if c.isprintable() else "\ufffd" for c in line)  # a path may hold anything
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class AccessLog:
    """Gives every HTTP request an id, sends it back as X-Request-Id, logs how it was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        id, begun, status = _id_of(scope), time.perf_counter(), 0
        token = REQUEST_ID.set(id)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if scope["path"] not in NO_LINES or status >= 500:
                _tell(scope, status, time.perf_counter() - begun)
            REQUEST_ID.reset(token)


def _id_of(scope: Scope) -> str:
    """The client's own id for its request if it is a plain word, else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if PLAIN_ID.fullmatch(given) else uuid.uuid4().hex


def _tell(scope: Scope, status: int, seconds: float) -> None:
    """The line of one HTTP request; no status: its client left, or the server failed, before one."""
    line = "%s %s %s", scope["method"], scope["path"], status or "unanswered"
    access_log.info(*line, extra={"status": status, "ms": round(seconds * 1e3, 1)})
