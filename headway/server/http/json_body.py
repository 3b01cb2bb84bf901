"""Parses request bodies as JSON; errors name the line, column or field.

Replaces FastAPI's own parsing, whose errors do not say where the problem is. Also limits the number
of values in a JSON text, counted without parsing it: parsing, validating and freeing values holds
the GIL, 0.2 us for a number and ten times that for a message or an object member, and an empty
list takes 30 times its two bytes of memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from headway.errors import find_lone_surrogate
from headway.server.http.errors import ApiError, format_value, lowercase_first
from headway.server.http.offload import offload, yield_gil

FIELD = re.compile(r"\w+(?![\w ])")  # the first part of a location
MAX_INLINE_BYTES = 1 << 16  # longer bodies are parsed on another thread
MAX_DIGITS = sys.get_int_max_str_digits()
MAX_VALUES = 1 << 19  # all values of a body together
MAX_CONTAINERS = 1 << 14  # lists and objects
MAX_MEMBERS = 1 << 16  # of all objects together
WINDOW = 1 << 16  # bytes counted between two pauses


class ParsedRequest(Request):
    """A request whose body has already been parsed."""

    value: object = None

    async def json(self) -> object:
        return self.value


class JsonRoute(APIRoute):
    """A route whose request bodies are parsed by `parse_object`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def parse_and_handle(request: Request) -> Response:
            parsed = ParsedRequest(request.scope, request.receive)
            body = await parsed.body()
            if len(body) <= MAX_INLINE_BYTES:
                parsed.value = parse_object(body)
            else:
                parsed.value = await offload(len(body), lambda: parse_object(body))
            return await handler(parsed)

        return parse_and_handle


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in a body; ApiError says what is wrong and where."""
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        what = f"0x{body[error.start]:02x} at byte {error.start} (line {line}): {error.reason}"
        raise ApiError(400, f"the body is not UTF-8 text: {what}") from None
    if problem := json_limit_error(body):
        raise ApiError(400, f"the body {problem}")
    value = _decode(text)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {format_value(value)}")
    # Only an escape can produce a lone surrogate, and locating one is slow: do it only if needed.
    if ("\\ud" in text or "\\uD" in text) and _has_lone_surrogate(value):
        _check_surrogates(value)
    return value


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos})"
        what = lowercase_first(error.msg).removesuffix(" at")
        raise ApiError(400, f"the body is not JSON: {what} at {place}") from None
    except RecursionError:
        raise ApiError(400, f"the body {_too_deep()}") from None
    except ValueError:  # an integer with thousands of digits: read as a float, out of all ranges
        return json.loads(text, parse_int=_parse_int)


def _parse_int(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _has_lone_surrogate(value: Any) -> bool:
    """Whether any string or key contains a lone surrogate; faster than finding its location."""
    stack = [value]
    while stack:
        container = stack.pop()
        inner = container.values() if isinstance(container, dict) else container
        keys = container if isinstance(container, dict) else ()
        for number, item in enumerate((*inner, *keys)):
            if isinstance(item, str):
                if find_lone_surrogate(item) is not None:
                    return True
            elif isinstance(item, dict | list):
                stack.append(item)
            if number % 1024 == 1023:
                yield_gil()
    return False


def _check_surrogates(value: Any) -> None:
    """ApiError for the first string with a lone surrogate, which is no character."""
    for location, text in _strings(value):
        place = find_lone_surrogate(text)
        if place is not None:
            problem = f"contains the lone surrogate \\u{ord(text[place]):04x} at character {place}"
            field = FIELD.match(location)
            message = f"{location} {problem}; send complete characters"
            raise ApiError(400, message, param=field and field[0])


def _strings(value: object) -> Iterator[tuple[str, str]]:
    """Every string in a value, including keys, with its location; in order."""
    levels: list[Iterator[tuple[str, object]]] = [iter([("", value)])]  # one iterator per level
    while levels:
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            continue
        location, item = found
        if isinstance(item, str):
            yield location, item
        elif isinstance(item, dict):
            yield from ((f"a key of {location or 'the body'}", key) for key in item)
            levels.append(_members(f"{location}." if location else "", item))
        elif isinstance(item, list):
            levels.append(_items(location, item))
        yield_gil()


def _members(prefix: str, item: dict[str, object]) -> Iterator[tuple[str, object]]:
    return ((f"{prefix}{key}", inner) for key, inner in item.items())


def _items(location: str, item: list[object]) -> Iterator[tuple[str, object]]:
    return ((f"{location}[{index}]", inner) for index, inner in enumerate(item))


def _count(outside: bytes) -> Counter[str]:
    """Counts of the punctuation of a JSON text."""
    return Counter({mark: outside.count(mark.encode()) for mark in "[]{},:"})


def _problem(counts: Counter[str]) -> str | None:
    """A description of the first limit that is exceeded; None if there is none."""
    num_opened = counts["["] + counts["{"]
    if num_opened - counts["]"] - counts["}"] > sys.getrecursionlimit():
        return _too_deep()
    for count, limit, things in (
        (num_opened, MAX_CONTAINERS, "lists and objects"),
        (counts[":"], MAX_MEMBERS, "object members"),
        (num_opened + counts[","] + 1, MAX_VALUES, "values"),
    ):
        if count > limit:
            return f"contains more than {limit} {things}; send fewer in one request"
    return None


def _too_deep() -> str:
    limit = sys.getrecursionlimit()
    return f"contains lists and objects nested more than {limit} levels deep; make it flatter"


def json_limit_error(data: bytes) -> str | None:
    """A description of the limit that a JSON text exceeds; None if it exceeds none."""
    # A container takes two bytes, a member takes more. Counts with strings are upper bounds.
    if len(data) <= 2 * MAX_CONTAINERS or _problem(_count(data)) is None:
        return None
    return _limit_error_outside_strings(data)


def _limit_error_outside_strings(data: bytes) -> str | None:
    start, in_string, counts = 0, False, Counter[str]()
    while start < len(data):
        window = data[start : start + WINDOW]
        if (len(window) - len(window.rstrip(b"\\"))) % 2 and len(window) > 1:
            window = window[:-1]  # this backslash escapes the first byte of the next window
        start += len(window)
        parts = window.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        counts.update(_count(b"".join(parts[int(in_string) :: 2])))
        in_string ^= len(parts) % 2 == 0
        if problem := _problem(counts):
            return problem
        yield_gil()
    return None
