"""Turns validation errors of FastAPI and Starlette into API errors.

Messages name the field by its location in the body (`messages[3].content[1].text`), the problem
and the limit. Types and values are written as in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headway.errors import ExecutorError
from headway.server.http.errors import ApiError, api_error, format_value, lowercase_first

EXPECTED = {  # by pydantic's error type
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
Location = tuple[str | int, ...]


class FieldError(NamedTuple):
    """One validation error of pydantic, with its location in the body."""

    place: Location  # in the body
    num_common: int  # leading parts of `location` that name no member of a union
    location: Location  # as in pydantic; includes the members of unions
    value: Any
    error: Mapping[str, Any]  # pydantic's error


def install(app: FastAPI) -> None:
    """Install exception handlers that return errors in the format of the path's API."""

    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                found = from_validation(error.errors(), error.body)
            case HTTPException():
                found = _from_http(request, error)
            case _:
                found = api_error(error)
        return found.response_at(request.url.path)

    for kind in (RequestValidationError, HTTPException, ApiError, ExecutorError):
        app.add_exception_handler(kind, handle)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """A 400 error for the first wrong field; for a union, it covers the errors of its members."""
    first = _field_error(errors[0], body)
    common = first.location[: first.num_common]
    same = [first]
    if len(common) < len(first.location):
        found = [_field_error(each, body) for each in errors]
        same = _furthest([each for each in found if each.location[: len(common)] == common])
    return ApiError(400, _message(same), param=str(first.place[0]))


def _field_error(error: Mapping[str, Any], body: Any) -> FieldError:
    """Follow pydantic's location through the body; parts not found there name union members."""
    location: Location = error["loc"][1:]
    place: list[str | int] = []
    num_common, at = len(location), body
    for number, part in enumerate(location):
        is_index = isinstance(at, list) and isinstance(part, int)
        if is_index or (isinstance(at, Mapping) and part in at):
            at = at[part]
        elif not (error["type"] == "missing" and number == len(location) - 1):
            num_common = min(num_common, number)
            continue
        place.append(part)
    return FieldError(tuple(place), num_common, location, at, error)


def _furthest(errors: Sequence[FieldError]) -> list[FieldError]:
    """The first error of each union member, for the members that matched the longest."""
    first_tokens: dict[str | int, FieldError] = {}
    for each in errors:
        first_tokens.setdefault(each.location[each.num_common], each)

    def order(error: FieldError) -> list[int]:
        return [part if isinstance(part, int) else 0 for part in error.place]

    last = max(order(each) for each in first_tokens.values())
    return [each for each in first_tokens.values() if order(each) == last]


def _message(same: Sequence[FieldError]) -> str:
    """The message for errors at one location."""
    first = same[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first.place)
    where = "".join(parts).removeprefix(".")
    kinds = [each.error["type"] for each in same]
    if kinds == ["missing"]:
        return f"{where} is missing"
    if "string_unicode" in kinds:
        return f"{where} contains a lone surrogate; send complete characters"
    for each, kind in zip(same, kinds, strict=True):
        if kind in SIZES:
            expected = SIZES[kind].format(**each.error["ctx"])
            return f"{where} must have {expected}, not {len(first.value)}"
    if isinstance(first.value, float) and math.isnan(first.value):
        return f"{where} must be a number, not NaN"
    expected = " or ".join(dict.fromkeys(_expected(each.error) for each in same))
    return f"{where} must be {expected}, not {format_value(first.value)}"


def _expected(error: Mapping[str, Any]) -> str:
    limits = {name: _as_json(value) for name, value in error.get("ctx", {}).items()}
    template = EXPECTED.get(error["type"])
    return lowercase_first(error["msg"]) if template is None else template.format(**limits)


def _as_json(value: Any) -> Any:
    """A limit as JSON writes it: whole floats without a point, strings in double quotes."""
    if isinstance(value, str):
        return value.replace("'", '"')
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _from_http(request: Request, error: HTTPException) -> ApiError:
    status, headers, path = error.status_code, dict(error.headers or {}), request.url.path
    problem = str(error.detail)
    if status == 404:
        problem = f"there is no path {format_value(path)}; GET /openapi.json lists all paths"
    elif status == 405:
        allowed = headers.get("Allow", "another method")
        problem = f"{request.method} is not allowed for {format_value(path)}; use {allowed}"
    return ApiError(status, problem, headers=headers)
