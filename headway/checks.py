"""Checks of values that users give; every error names the value and its range.

`whole_number`, `real_number`, `text` and `one_of` return the value or raise ConfigError; readers of
files catch it and add the file and the line. A dataclass that derives from `Checked` checks its
`number`, `count` and `policy` fields.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import field, fields
from itertools import islice
from math import inf
from operator import index
from typing import Any, ClassVar

from headway.errors import ConfigError, InvalidRequest, shorten

MAX_FLOAT = sys.float_info.max
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PROMPT = 1 << 27  # tokens
MAX_STOPS = 1 << 20  # token ids


NUMBER = (int, float)  # quicker than a union, which is built anew for each check
TOKEN_SETS = (frozenset, set, list, tuple)


def number_problem(
    value: object, low: float, high: float = inf, *, whole: bool, above: bool = False
) -> str | None:
    """What is wrong with a number, as "must be ..., not ..."; None if it is in [low, high].

    With `above`, `low` itself is out of range too.
    """
    is_number = isinstance(value, int if whole else NUMBER) and not isinstance(value, bool)
    # Infinities, and integers that no float can hold, would fail later in arithmetic.
    if is_number and low <= value <= high and value <= MAX_FLOAT and not (above and value == low):  # type: ignore[operator]
        return None
    noun = "a whole number" if whole else "a number"
    if above:
        limits = f" above {_text(low)}" + (f" and at most {_text(high)}" if high < inf else "")
    elif is_number and value < low:  # type: ignore[operator]
        limits = f" of at least {_text(low)}"
    elif is_number and value > high:  # type: ignore[operator]
        limits = f" of at most {_text(high)}"
    else:
        limits = f" from {_text(low)} to {_text(high)}" if high < inf else f" of at least {low}"
    return f"must be {noun}{limits}, not {shorten(value)}"


def _text(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An int in [low, high]; bool and float are refused."""
    problem = number_problem(value, low, inf if high is None else high, whole=True)
    if problem:
        raise ConfigError(f"{name} {problem}")
    return int(value)


def real_number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> float:
    """A finite int or float with low <= value, above < value and value <= high where given."""
    lowest = next((limit for limit in (above, low) if limit is not None), -MAX_FLOAT)
    highest = MAX_FLOAT if high is None else high
    if number_problem(value, lowest, highest, whole=False, above=above is not None):
        limits = {"at least": low, "above": above, "at most": high}
        given = [f"{words} {limit:g}" for words, limit in limits.items() if limit is not None]
        raise ConfigError(f"{name} must be a number {' and '.join(given)}, not {value!r}")
    return float(value)


def number(default: Any, low: float, high: float = inf, *, above: bool = False) -> Any:
    """A field of a Checked dataclass: a number in [low, high]; with `above`, not `low` itself."""
    limits = {"low": low, "high": high, "whole": False, "above": above}
    return field(default=default, metadata=limits)


def count(default: Any, low: int, high: float = inf) -> Any:
    """A field of a Checked dataclass: a whole number in [low, high]."""
    return field(default=default, metadata={"low": low, "high": high, "whole": True})


def policy(default: Any) -> Any:
    """A field of a Checked dataclass: a policy, which is a function."""
    return field(default=default, metadata={"is_function": True})


class Checked:
    """Base of dataclasses with fields of these kinds; ConfigError if a value is wrong.

    A field whose default is None may be None.
    """

    prefix: ClassVar[str | None] = None  # of an error; None: the name of the class

    def __post_init__(self) -> None:
        prefix = f"{type(self).__name__}: " if self.prefix is None else self.prefix
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if not entry.metadata or (value is None and entry.default is None):
                continue
            if "is_function" in entry.metadata:
                problem = None if callable(value) else f"must be a function, not {shorten(value)}"
            else:
                problem = number_problem(value, **entry.metadata)
            if problem:
                raise ConfigError(f"{prefix}{entry.name} {problem}")


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {value!r}")
    return value


def one_of(name: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value


def token_array(name: str, ids: Iterable[int]) -> array[int]:
    """Token ids as 32-bit numbers; InvalidRequest names the first value that is not one."""
    if isinstance(ids, array) and ids.typecode == "i" and len(ids) <= MAX_PROMPT:
        return ids[:]
    if type(ids) in (list, array) and len(ids) <= MAX_PROMPT:  # type: ignore[arg-type]  # quickly
        with suppress(TypeError, OverflowError):
            return array("i", ids)
    problem = f"a list of token ids from 0 to {MAX_TOKEN_ID}"
    if isinstance(ids, str | bytes | bytearray | Mapping):
        raise InvalidRequest(f"{name} must be {problem}, not {shorten(ids)}")
    try:
        if isinstance(ids, Iterator):  # kept in a list, so that a wrong value can be named
            ids = list(islice(ids, MAX_PROMPT + 1))
        if _num_elements(ids) <= MAX_PROMPT:
            return array("i", ids)
        problem = f"at most {MAX_PROMPT} tokens long"
    except (TypeError, ValueError, OverflowError):
        ids = _first_wrong(ids)  # type: ignore[assignment]
    raise InvalidRequest(f"{name} must be {problem}, not {shorten(ids)}")


def _first_wrong(ids: object) -> object:
    """The first element that is not a 32-bit number; the value itself if it has no elements."""
    with suppress(TypeError, ValueError):
        for token in ids:  # type: ignore[attr-defined]
            try:
                array("i", [index(token)])
            except (TypeError, OverflowError):
                return token
    return ids


def are_token_ids(ids: object) -> bool:
    """Whether this is a collection of at most MAX_STOPS token ids."""
    is_collection = isinstance(ids, TOKEN_SETS) or (  # quick for common types
        isinstance(ids, Collection) and not isinstance(ids, str | bytes | Mapping)
    )
    return (
        is_collection
        and _num_elements(ids) <= MAX_STOPS
        and all(isinstance(i, int) and -MAX_TOKEN_ID <= i <= MAX_TOKEN_ID for i in ids)  # type: ignore[attr-defined]
    )


def _num_elements(values: object) -> float:
    """The length, 0 if it is unknown; infinite if len() cannot return it, as for range(10**30)."""
    try:
        return len(values) if isinstance(values, Sized) else 0
    except OverflowError:
        return inf
