"""Log output as text or JSON lines, each with the id of the HTTP request it belongs to.

A separate thread writes the lines, so a slow disk or a full pipe delays neither the engine nor a
response. Lines that do not fit into the queue or on the disk are dropped and counted. Headers, query
strings and values of bodies are never logged, so logs contain no keys and no prompts.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from threading import Thread
from typing import IO, Literal

from headway.server.http.middleware import REQUEST_ID

LogFormat = Literal["human", "json"]
MAX_QUEUED = 10_000  # lines
STOP_TIMEOUT = 2.0  # seconds to write the remaining lines
STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({})))


def setup(
    format: LogFormat = "human", level: str = "INFO", file: IO[str] | None = None
) -> Callable[[], None]:
    """Log to a file, by default stderr; the returned function stops it."""
    output = LossyStreamHandler(file or sys.stderr)
    output.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler = DroppingQueueHandler(Queue(MAX_QUEUED))
    listener = WaitingQueueListener(handler.queue, output)
    root = logging.getLogger()
    level_before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    listener.start()

    def stop() -> None:
        root.removeHandler(handler)
        root.setLevel(level_before)
        # In a thread, because a blocked output must not keep the process from exiting.
        stopping = Thread(target=listener.stop, name="log-stop", daemon=True)
        stopping.start()
        stopping.join(STOP_TIMEOUT)
        if handler.num_dropped and not stopping.is_alive():
            output.warn(f"{handler.num_dropped} lines were dropped because the log queue was full")

    return stop


class LossyStreamHandler(logging.StreamHandler[IO[str]]):
    """Loses lines while the disk is full, and says so once when it can write again."""

    _num_lost, _problem = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        num_lost = self._num_lost
        super().emit(record)
        if num_lost and num_lost == self._num_lost:
            self._num_lost = 0
            self.warn(f"up to {num_lost} lines are missing before this one: {self._problem}")

    def warn(self, message: str) -> None:
        """Write a warning that does not come from a logger."""
        attributes = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        self.emit(logging.makeLogRecord({**attributes, "msg": message}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - of the base class
        error = sys.exception()
        if not isinstance(error, OSError):
            return super().handleError(record)
        self._num_lost += 1
        self._problem = error.strerror or str(error)
        return None


class DroppingQueueHandler(QueueHandler):
    """Adds the request id to records and queues them; drops them while the queue is full."""

    num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if not hasattr(record, "request_id") and (id := REQUEST_ID.get()):
            record.request_id = id
        return record  # unlike the base class, keep the exception for the formatter

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except Full:
            self.num_dropped += 1


class WaitingQueueListener(QueueListener):
    """A listener whose `stop` waits for space in a full queue."""

    def enqueue_sentinel(self) -> None:
        self.queue.put(None)  # type: ignore[attr-defined]  # it is a queue.Queue


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """The attributes given as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in STANDARD_ATTRIBUTES}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **_extra(record),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message, followed by further attributes as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        extra = "".join(f"  {key}={value}" for key, value in _extra(record).items())
        line = f"{time} {record.levelname.lower():<7} {record.getMessage()}{extra}"
        # A request path may contain any characters.
        line = "".join(c if c.isprintable() else "\ufffd" for c in line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
