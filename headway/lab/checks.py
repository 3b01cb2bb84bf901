"""Checks of values that a user writes in options, workloads and profiles.

Every check returns the value, or raises ConfigError with the name, the limit and the value. Readers
of files catch it and add the file and the line.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from headway.checks import number_problem
from headway.errors import ConfigError


def whole_number(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An int in [low, high]; bool and float are refused."""
    problem = number_problem(value, low, math.inf if high is None else high, whole=True)
    if problem:
        raise ConfigError(f"{name} {problem}")
    return int(value)


def number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> float:
    """A finite int or float with low <= value, above < value and value <= high where given."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_good = (
        is_number
        and math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )
    if not is_good:
        limits = {"at least": low, "above": above, "at most": high}
        given = [f"{words} {limit:g}" for words, limit in limits.items() if limit is not None]
        raise ConfigError(f"{name} must be a number {' and '.join(given)}, not {value!r}")
    return float(value)


def text(name: str, value: Any) -> str:
    """A str."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {value!r}")
    return value


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """One of the known values."""
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value
