"""What went wrong, as OpenAI's clients expect to be told: a status, and a body that names the field.

Knows which of our exceptions are the client's fault, and nothing of endpoints.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from headway.errors import (
    ExecutorError,
    InvalidRequest,
    ModelError,
    Overloaded,
    PolicyError,
    RequestError,
)

log = logging.getLogger("headway.server")
LONGEST_SHOWN = 80  # characters of a wrong value
JSON = json.JSONEncoder(ensure_ascii=False, default=repr)
OWN_ID = re.compile(r"request '[^']*': ")  # clients know no such ids
FIELD = re.compile(r"([a-z][a-z_]*)(?=[\s:\[.])")
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
NO_FIELDS = frozenset({"request", "the", "this", "client", "text", "a", "an"})


class ApiError(Exception):
    """An answer that is no answer: status, and what OpenAI's error body holds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": _kind(self.status), "param": self.param}
        return {"error": {**error, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body as Anthropic's API has it."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error")
        if kind == "api_error" and self.status < 500:
            kind = "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    @property
    def response(self) -> Response:
        return self.response_at("/")

    def response_at(self, path: str) -> Response:
        """The error in the shape of the API that has this path."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        return Response(to_json(body), self.status, self.headers, "application/json")


def to_json(value: Any) -> bytes:
    """ASCII only: half of a surrogate pair, which a client may have sent, has no UTF-8."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def refused(param: str, problem: str, code: str | None = None) -> ApiError:
    """A 400 for one field."""
    return ApiError(400, f"{param} {problem}", param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """An error whose field has another name in the API that it is reported by."""
    name = names.get(error.param or "")
    if name is None:
        return error
    words = str(error).replace(str(error.param), name, 1)
    return ApiError(error.status, words, param=name, code=error.code, headers=error.headers)


def shown(value: object) -> str:
    """A wrong value as JSON writes it, as much of it as a message needs."""
    text = ""
    for piece in JSON.iterencode(value):  # piece by piece: it may be a million times as long
        text += piece[: LONGEST_SHOWN + 1]
        if len(text) > LONGEST_SHOWN:
            return f"{text[:LONGEST_SHOWN]}..."
    return text


def api_error(error: Exception, *, is_closing: bool = False) -> ApiError:
    """Any exception as an answer; what nobody thought of is a 500, and logged."""
    match error:
        case ApiError():
            return error
        case Overloaded() if is_closing:
            return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "1"})
        case Overloaded():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(429, str(error), code="overloaded", headers=wait)
        case InvalidRequest() | RequestError():
            words = OWN_ID.sub("", str(error), count=1)
            return ApiError(400, words, param=_field_of(words))
        case ModelError():  # the model cannot do what was asked, such as chat without a template
            return ApiError(400, str(error))
        case PolicyError():  # a user's own policy is broken, not the request
            log.error("a request was refused: %s", error)
            return ApiError(500, str(error), code="policy_failed")
        case ExecutorError():
            return ApiError(503, str(error), code="engine_gone")
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", code="timeout")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__} in the server", code="internal_error")


def lowered(message: str) -> str:
    """A sentence's words, to be part of another."""
    return message[:1].lower() + message[1:]


def _field_of(message: str) -> str | None:
    """The field that one of our own messages begins with."""
    found = FIELD.match(message)
    return found[1] if found and found[1] not in NO_FIELDS else None


def _kind(status: int) -> str:
    named = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")
