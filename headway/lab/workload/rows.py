"""The lines of a workload file as rows of named values. Every error names the file and the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from headway.checks import real_number, whole_number
from headway.errors import FormatError
from headway.lab.workload.request import MAX_TOKENS

MAX_SECONDS = 1e15
T = TypeVar("T")
ALIASES = {
    "arrival_s": "arrival", "prompt_tokens": "prompt", "output_tokens": "output",
    "TIMESTAMP": "arrival", "ContextTokens": "prompt", "GeneratedTokens": "output",
    "client_id": "client", "timestamp": "arrival", "input_length": "prompt",
    "output_length": "output",
}  # fmt: skip
FIELDS = (
    "arrival", "prompt", "output", "max_tokens", "prefix", "prefix_tokens", "client", "priority",
    "deadline", "n", "id", "accept", "seed",
)  # fmt: skip
REQUIRED = FIELDS[:3]


class Row:
    """One line by Headway's field names. A bad value raises ValueError with the file's own name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {ALIASES.get(name, name): value for name, value in values.items()}
        self._names = {ALIASES.get(name, name): name for name in values}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        if key not in self._values:
            raise ValueError(f"missing field {_spellings(key)}")
        return self._values[key]

    def whole(
        self, key: str, low: int, high: int = MAX_TOKENS, *, default: int | None = None
    ) -> int:
        if default is not None and key not in self:
            return default
        return whole_number(self._names.get(key, key), self.get(key), low, high)

    def seconds(self, key: str) -> float:
        value, name = self.get(key), self._names[key]
        if isinstance(value, timedelta):
            return value.total_seconds()
        real_number(name, value, low=0, high=MAX_SECONDS)
        return value / 1000 if name == "timestamp" else float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; an integer is accepted as its digits."""
        value = self.get(key) if default is None else self._values.get(key, default)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError(f"{self._names[key]} must be a string, not {value!r}")
        return str(value)

    def hashes(self) -> list[int | str]:
        values = self.get("hash_ids")
        if not (isinstance(values, list) and all(isinstance(v, int | str) for v in values)):
            raise ValueError(f"hash_ids must be a list of numbers, not {values!r}")
        return values

    def refuse_unknown(self) -> None:
        for key in sorted(self._values.keys() - FIELDS):
            raise ValueError(f"unknown field {self._names[key]!r}; known: {', '.join(FIELDS)}")


def read_rows(path: Path, make: Callable[[Row], T]) -> Iterator[T]:
    """The results of `make` for every row; an error becomes a FormatError with file and line."""
    rows_of = FORMATS.get(path.suffix.lower())
    if rows_of is None:
        known = ", ".join(FORMATS)
        raise FormatError(path, None, f"unknown workload file type; known: {known}")
    try:
        file = path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise FormatError(path, None, f"cannot be read: {error.strerror}") from None
    number = 0  # of the line that was read last

    def lines() -> Iterator[str]:
        nonlocal number
        for line in file:
            number += 1
            yield line

    with file:
        try:
            for row in rows_of(lines()):
                yield make(row)
        except UnicodeDecodeError:
            raise FormatError(path, number + 1, "not UTF-8 text") from None
        except (ValueError, csv.Error, RecursionError) as error:
            raise FormatError(path, number or None, str(error)) from None


def _csv_rows(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    names = next(reader, None)
    if names is None:
        raise ValueError("the file is empty")
    header = [name.strip() for name in names]
    for key in REQUIRED:
        if not any(ALIASES.get(name, name) == key for name in header):
            raise ValueError(f"the header has no column {_spellings(key)}")
    start: datetime | None = None
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise ValueError(f"expected {len(header)} columns, found {len(cells)}")
        values: dict[str, object] = dict(zip(header, cells, strict=True))
        if "TIMESTAMP" in values:
            date = _date(str(values["TIMESTAMP"]))
            start = start or date
            values["TIMESTAMP"] = date - start
        yield Row({name: _number(name, value) for name, value in values.items()})


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and a time, not {text!r}") from None


def _number(name: str, value: Any) -> Any:
    """The number in a cell of a numeric column; any other cell unchanged."""
    if ALIASES.get(name, name) not in REQUIRED:
        return value
    for kind in (int, float):
        with suppress(TypeError, ValueError):
            return kind(value)
    return value


def _json_rows(lines: Iterable[str]) -> Iterator[Row]:
    for text in lines:
        if text.isspace():
            continue
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(values, dict):
            raise ValueError(f"a line must be a JSON object, not {text.strip()[:40]}")
        row = Row(values)
        if "hash_ids" not in row:
            row.refuse_unknown()
        yield row


FORMATS = {".csv": _csv_rows, ".jsonl": _json_rows}


def _spellings(key: str) -> str:
    """A field's name and its aliases."""
    return " or ".join([key, *(name for name, known in ALIASES.items() if known == key)])
