"""Checks of values that users give; every error names the value and its range."""

from __future__ import annotations

import sys
from math import inf

from headway.errors import shorten

MAX_FLOAT = sys.float_info.max


def number_problem(value: object, low: float, high: float = inf, *, whole: bool) -> str | None:
    """What is wrong with a number, as "must be ..., not ..."; None if it is in [low, high]."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    # Infinities, and integers that no float can hold, would fail later in arithmetic.
    if is_number and low <= value <= min(high, MAX_FLOAT):  # type: ignore[operator]
        return None
    noun = "a whole number" if whole else "a number"
    if is_number and value < low:  # type: ignore[operator]
        limits = f"of at least {_text(low)}"
    elif is_number and value > high:  # type: ignore[operator]
        limits = f"of at most {_text(high)}"
    else:
        limits = f"from {_text(low)} to {_text(high)}" if high < inf else f"of at least {low}"
    return f"must be {noun} {limits}, not {shorten(value)}"


def _text(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
