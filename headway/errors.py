"""Every exception a user of Headway can meet.

HeadwayError
├── ConfigError          numbers that contradict each other, unknown preset, slot or profile
├── RequestError         one request is at fault; the others go on
│   ├── InvalidRequest   it makes no sense: empty prompt, max_tokens 0, an id already in use
│   │   └── InvalidGrammar   its grammar cannot be compiled or followed
│   ├── RequestTooLong   it makes sense but can never run here; carries need and limit
│   └── Overloaded       too much waits already; it may be sent again later
├── ModelError           a model cannot be found, fetched or loaded; says what was tried
├── FormatError          a workload, profile or trace file cannot be read; names file and line
├── ReplayMismatch       a replay took another decision than the recorded run
├── PolicyError          a policy raised, or returned what its slot cannot use; carries the slot
└── ExecutorError        a step failed; the requests in flight were failed with its reason
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Anything Headway raises on purpose."""


class ConfigError(HeadwayError, ValueError):
    """The configuration cannot work; the message says which value and why."""


class RequestError(HeadwayError, ValueError):
    """One request was refused at the door."""


class InvalidRequest(RequestError):
    """The request makes no sense, here or anywhere."""


class InvalidGrammar(InvalidRequest):
    """The grammar of a request cannot be compiled, or cannot be followed within the limits."""


class RequestTooLong(RequestError):
    """The request could never run under these limits."""

    def __init__(self, message: str, *, need: int, limit: int) -> None:
        super().__init__(message)
        self.need = need
        self.limit = limit


class Overloaded(RequestError):
    """The request was not taken because too much waits; it may come again."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class FormatError(HeadwayError, ValueError):
    """A file does not hold what it should; names the file and, where there is one, the line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")


class ModelError(HeadwayError):
    """A model cannot be found, fetched or loaded; the message says what was tried and what to do."""


class ReplayMismatch(HeadwayError):
    """A replay parted from the recorded run."""


class ExecutorError(HeadwayError):
    """The executor failed a step."""


class PolicyError(HeadwayError):
    """A policy raised, or returned a value that its slot cannot use. The request is not at fault."""

    def __init__(self, message: str, *, slot: str) -> None:
        super().__init__(message)
        self.slot = slot  # queue, chunk, ...


MAX_SHOWN = 60  # characters of a wrong value in a message


def shorten(value: object) -> str:
    """A wrong value for an error message: its repr, cut to MAX_SHOWN characters. Never raises."""
    if (
        isinstance(value, int) and value.bit_length() > 1024
    ):  # Python refuses to print very long ones
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
