"""What FastAPI and Starlette refuse, said as we say it: the field, its problem and the limit.

Fields are named by their place in the body (`messages[3].content[1].text`), types and values as
JSON names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headway.server.http.errors import ApiError, api_error, lowered, shown

WANTED = {  # by pydantic's name of the problem
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}
SIZES = {
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} item",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} character",
}
Place = tuple[str | int, ...]


class Problem(NamedTuple):
    """One thing that is wrong, with its place in the body."""

    place: Place
    num_common: int  # parts of its location before the first of a union's kinds; all, if none
    location: Place
    value: Any
    found: Mapping[str, Any]  # as pydantic tells it


def install(app: FastAPI) -> None:
    """Answer whatever is refused before an endpoint has it, in OpenAI's shape."""

    async def wrong_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors(), error.body).response_at(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _from_http(request, error).response_at(request.url.path)

    async def ours(request: Request, error: Exception) -> Response:
        return api_error(error).response_at(request.url.path)

    app.add_exception_handler(RequestValidationError, wrong_body)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ApiError, ours)


def from_validation(found: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first thing that is wrong with a body; of a field of several kinds, each kind's."""
    first = _problem(found[0], body)
    common = first.location[: first.num_common]
    same = [first]
    if len(common) < len(first.location):
        all_ = [_problem(each, body) for each in found]
        same = _furthest([each for each in all_ if each.location[: len(common)] == common])
    return ApiError(400, _words(same), param=str(first.place[0]))


def _problem(found: Mapping[str, Any], body: Any) -> Problem:
    """Follow a location through the body: what leads nowhere there names a union's kind."""
    location: Place = found["loc"][1:]
    place: list[str | int] = []
    num_common, at = len(location), body
    for number, part in enumerate(location):
        is_index = isinstance(at, list) and isinstance(part, int)
        if is_index or (isinstance(at, Mapping) and part in at):
            at = at[part]
        elif not (found["type"] == "missing" and number == len(location) - 1):
            num_common = min(num_common, number)
            continue
        place.append(part)
    return Problem(tuple(place), num_common, location, at, found)


def _furthest(problems: Sequence[Problem]) -> list[Problem]:
    """Of each kind's first problem, those that come last in the body: it was most nearly right."""
    firsts: dict[str | int, Problem] = {}
    for each in problems:
        firsts.setdefault(each.location[each.num_common], each)

    def order(problem: Problem) -> list[int]:
        return [part if isinstance(part, int) else 0 for part in problem.place]

    most = max(order(each) for each in firsts.values())
    return [each for each in firsts.values() if order(each) == most]


def _words(same: Sequence[Problem]) -> str:
    """One sentence for what is wrong at one place."""
    first = same[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first.place)
    where = "".join(parts).removeprefix(".")
    kinds = [each.found["type"] for each in same]
    if kinds == ["missing"]:
        return f"{where} is missing"
    if "string_unicode" in kinds:
        return f"{where} holds half of a surrogate pair; send whole characters"
    for each, kind in zip(same, kinds, strict=True):
        if kind in SIZES:
            wanted = SIZES[kind].format(**each.found["ctx"])
            return f"{where} must have {wanted}, not {len(first.value)}"
    if isinstance(first.value, float) and math.isnan(first.value):
        return f"{where} must be a number, not NaN"
    wanted = " or ".join(dict.fromkeys(_wanted(each.found) for each in same))
    return f"{where} must be {wanted}, not {shown(first.value)}"


def _wanted(found: Mapping[str, Any]) -> str:
    limits = {name: _plain(value) for name, value in found.get("ctx", {}).items()}
    form = WANTED.get(found["type"])
    return lowered(found["msg"]) if form is None else form.format(**limits)


def _plain(value: Any) -> Any:
    """As JSON: a whole number without its point, a text in double quotes."""
    if isinstance(value, str):
        return value.replace("'", '"')
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _from_http(request: Request, error: HTTPException) -> ApiError:
    status, headers, path = error.status_code, dict(error.headers or {}), request.url.path
    problem = str(error.detail)
    if status == 404:
        problem = f"there is no {shown(path)} here; GET /openapi.json tells what there is"
    elif status == 405:
        allowed = headers.get("Allow", "another")
        problem = f"{request.method} is not for {shown(path)}; {allowed} is"
    return ApiError(status, problem, headers=headers)
