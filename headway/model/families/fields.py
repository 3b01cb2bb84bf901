"""Typed access to the fields of a model's config, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ModelError

MAX_NUMBER = 1 << 40  # above any sensible value, so that sums do not overflow


class Fields:
    """Typed reads from a mapping; ModelError for a field that is missing or has another type."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.read: set[str] = set()  # keys that were read, or that have no effect here

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null in the file is the same as a missing field."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        return value

    def count(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_NUMBER
    ) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            limits = f"from {minimum} to {maximum}"
            raise self.error(f"{key} is {value!r}; it must be an integer {limits}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A number above `minimum`."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not minimum < value < MAX_NUMBER:
            raise self.error(f"{key} is {value!r}; it must be a number above {minimum:g}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        listed = self._get(key, None)
        if not isinstance(listed, list) or not listed:
            raise self.error(f"{key} is {listed!r}; it must be a list of numbers")
        parts = Fields({f"{key}[{place}]": value for place, value in enumerate(listed)}, self.where)
        return tuple(parts.number(name) for name in parts.values)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(f"{key} is {value!r}; it must be true or false")
        return value

    def ids(self, *keys: str) -> frozenset[int]:
        """The token ids of all keys; each key may hold none, one or a list."""
        found: set[int] = set()
        for key in keys:
            value = self.get(key)
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(id) is int and id >= 0 for id in listed):
                raise self.error(f"{key} is {value!r}; it must be a token id or a list of them")
            found.update(listed)
        return frozenset(found)
