"""All exceptions that Headway raises on purpose.

HeadwayError
├── ConfigError          contradictory settings; unknown preset, slot, profile or argument
│   └── OwnPolicyError   a link, trace or message names a user's module; has names
├── RequestError         one request is refused; the others continue
│   ├── InvalidRequest   malformed: empty prompt, max_tokens 0, an id that an open request has
│   │   └── InvalidGrammar   its grammar cannot be compiled or followed
│   ├── RequestTooLong   it can never run with these limits; has need and limit
│   ├── NotResumable     no replica has it any more, or it differs; has differs
│   └── Overloaded       the queue is full; it can be sent again later
├── ModelError           a model cannot be found, downloaded or loaded
├── FormatError          a workload, profile or trace file is invalid; names file and line
├── ReplayMismatch       a replay made a different decision than the recorded run
├── PolicyError          a policy raised or returned an invalid value; has slot and request
└── ExecutorError        a step failed, and the requests in flight failed with it
    └── NoReplica        a fleet has no replica for a request; it can be sent again later
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any

PACKAGE = f"{Path(__file__).parent}{os.sep}"


class HeadwayError(Exception):
    """Base class of all exceptions of Headway."""


class ConfigError(HeadwayError, ValueError):
    """The configuration is invalid; the message names the value and the reason."""


class OwnPolicyError(ConfigError):
    """Data, such as a link or a trace, names policies of a user's module: `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{shorten(', '.join(self.names))} would be imported, but only ready-made policies are "
            "allowed here; --allow-own-policies allows others"
        )


class RequestError(HeadwayError, ValueError):
    """A request was refused before it ran."""


class InvalidRequest(RequestError):
    """The request is malformed."""


class InvalidGrammar(InvalidRequest):
    """The grammar of a request cannot be compiled or followed within the limits."""


class RequestTooLong(RequestError):
    """The request can never run with these limits."""

    def __init__(self, message: str, *, need: int, limit: int, settings_advice: str = "") -> None:
        super().__init__(message)
        self.need = need
        self.limit = limit
        # The end of the message that advises other settings, which a server's client cannot change.
        self.settings_advice = settings_advice


class Overloaded(RequestError):
    """The queue is full; the request can be sent again later."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class NotResumable(RequestError):
    """The request that a client wants to continue is not known any more, or differs."""

    def __init__(self, message: str, *, differs: bool = False) -> None:
        super().__init__(message)
        self.differs = differs  # the request is known, but has another prompt or other params


class FormatError(HeadwayError, ValueError):
    """The content of a file is invalid; the message names the file and, if known, the line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")


class ModelError(HeadwayError):
    """A model cannot be found, downloaded or loaded; the message says what to do."""


class ReplayMismatch(HeadwayError):
    """A replay differs from the recorded run."""


class ExecutorError(HeadwayError):
    """A step of the executor failed, or the engine has stopped."""


class NoReplica(ExecutorError):
    """No replica of a fleet can take a request; it can be sent again later."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class PolicyError(HeadwayError):
    """A policy raised, or returned a value that is invalid for its slot."""

    def __init__(self, message: str, *, slot: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.slot = slot  # queue, chunk, ...
        self.request_id = request_id  # of the request that it was called for; None: no single one


def policy_failed(
    slot: str, rule: object, where: str, error: Exception, request_id: str | None = None
) -> PolicyError:
    """The PolicyError for an exception that a policy raised."""
    if isinstance(error, PolicyError):
        return error
    cause, line = f"{type(error).__name__}: {error}", line_of_policy(error)
    text = f"{slot} policy {_name(rule)} failed {where}: {cause}"
    return PolicyError(f"{text} ({line})" if line else text, slot=slot, request_id=request_id)


def bad_result(
    slot: str, rule: object, result: object, wanted: str, request_id: str | None = None
) -> PolicyError:
    """The PolicyError for a value that a policy must not return."""
    text = f"{slot} policy {_name(rule)} returned {shorten(result)} {wanted}"
    return PolicyError(text, slot=slot, request_id=request_id)


def _name(rule: object) -> str:
    """module:function; module:class for an object."""
    rule = getattr(rule, "function", rule)  # of a queue rule that wraps a user's function
    named: Any = rule if hasattr(rule, "__qualname__") else type(rule)
    return f"{named.__module__}:{named.__qualname__}"


def line_of_policy(error: Exception) -> str | None:
    """file:line, the latest in the file of the user's policy; None if no such file took part."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    outside = [(file, line) for file, line in lines if not file.startswith(PACKAGE)]
    own = [line for file, line in outside if file == outside[0][0]]
    return f"{outside[0][0]}:{own[-1]}" if own else None


MAX_SHOWN = 60  # maximum characters of a value in a message


def shorten(value: object) -> str:
    """The repr of a value for an error message, at most MAX_SHOWN characters. Never raises."""
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print huge ones
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def find_lone_surrogate(text: str) -> int | None:
    """Index of the first lone surrogate, which is no character; None if there is none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
