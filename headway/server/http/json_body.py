"""From the bytes of a body to its JSON; whatever is wrong with it is told with its place.

Takes the place of FastAPI's own reading, which says only that there was an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from headway.server.http.errors import ApiError, lowered, shown
from headway.server.http.json_size import excess
from headway.server.http.offload import aside, pause

FIELD = re.compile(r"\w+(?![\w ])")  # what a place begins with
QUICK = 1 << 16  # bytes; reading more is not for the event loop
MAX_DIGITS = sys.get_int_max_str_digits()


class ReadRequest(Request):
    """A request whose body has been read."""

    value: Any = None

    async def json(self) -> Any:
        return self.value


class ReadRoute(APIRoute):
    """A route whose bodies `read_object` reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def read(request: Request) -> Response:
            mine = ReadRequest(request.scope, request.receive)
            body = await mine.body()
            if len(body) <= QUICK:
                mine.value = read_object(body)
            else:
                mine.value = await aside(len(body), lambda: read_object(body))
            return await answer(mine)

        return read


def read_object(body: bytes) -> dict[str, Any]:
    """The object that a body writes; ApiError says what is wrong, and where."""
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        what = f"0x{body[error.start]:02x} at byte {error.start} (line {line}): {error.reason}"
        raise ApiError(400, f"the body is not UTF-8 text: {what}") from None
    if problem := excess(body):
        raise ApiError(400, f"the body {problem}")
    value = _decoded(text)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(value)}")
    if ("\\ud" in text or "\\uD" in text) and _has_half(value):  # only an escape can write one
        _check_pairs(value)
    return value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos})"
        what = lowered(error.msg).removesuffix(" at")
        raise ApiError(400, f"the body is not JSON: {what} at {place}") from None
    except RecursionError:
        limit = sys.getrecursionlimit()
        raise ApiError(400, f"the body's lists and objects are nested over {limit} deep") from None
    except ValueError:  # a number of thousands of digits: as 1e999, it is beyond all limits
        return json.loads(text, parse_int=_number)


def _number(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _has_half(value: Any) -> bool:
    """Whether a text in a value, or a key, holds half of a surrogate pair; quicker than its place."""
    left = [value]
    while left:
        each = left.pop()
        inner = each.values() if isinstance(each, dict) else each
        keys = each if isinstance(each, dict) else ()
        for number, item in enumerate((*inner, *keys)):
            if isinstance(item, str):
                if not _is_whole(item):
                    return True
            elif isinstance(item, dict | list):
                left.append(item)
            if number % 1024 == 1023:
                pause()
    return False


def _is_whole(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_pairs(value: Any) -> None:
    """ApiError for a text with half of a surrogate pair: it is no character, and has no tokens."""
    for where, text in _texts(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}, half of a surrogate pair,"
            problem = f"holds {half} at character {error.start}; send whole characters"
            field = FIELD.match(where)
            raise ApiError(400, f"{where} {problem}", param=field and field[0]) from None


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """Every text in a value, keys too, with its place; in order."""
    open_: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]  # one for each level
    while open_:
        found = next(open_[-1], None)
        if found is None:
            open_.pop()
            continue
        where, each = found
        if isinstance(each, str):
            yield where, each
        elif isinstance(each, list):
            open_.append(_items(where, each))
        elif isinstance(each, Mapping):
            yield from ((f"a key of {where or 'the body'}", key) for key in each)
            dot = "." if where else ""
            open_.append(_members(where + dot, each))
        pause()


def _members(prefix: str, each: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}{key}", inner) for key, inner in each.items())


def _items(where: str, each: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{where}[{at}]", inner) for at, inner in enumerate(each))
