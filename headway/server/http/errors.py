"""API errors: an HTTP status and a body in the format of OpenAI's or Anthropic's API.

Maps the package's exceptions to statuses. Knows no endpoints.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from headway.errors import (
    ExecutorError,
    InvalidRequest,
    ModelError,
    Overloaded,
    PolicyError,
    RequestError,
    RequestTooLong,
)
from headway.server.http.json_output import to_json

log = logging.getLogger("headway.server")
MAX_SHOWN_CHARACTERS = 80  # of a wrong value in a message
ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)
REQUEST_ID_PREFIX = re.compile(r"request '[^']*': ")  # internal ids mean nothing to clients
FIELD = re.compile(r"([a-z][a-z_]*)(?=[\s:\[.])")
ANTHROPIC_PATH = "/v1/messages"
OPENAI_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
# First words of messages that name no field.
NOT_FIELDS = frozenset({"request", "the", "this", "client", "text", "a", "an"})


class ApiError(Exception):
    """An error response: HTTP status, message, and the members of OpenAI's error body."""

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
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = OPENAI_TYPES.get(self.status, default)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in the format of Anthropic's API."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response_at(self, path: str) -> Response:
        """The response in the format of the API that serves `path`."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        return Response(to_json(body), self.status, self.headers, "application/json")


def field_error(param: str, problem: str) -> ApiError:
    """A 400 error for one field; the message is the field's name followed by `problem`."""
    return ApiError(400, f"{param} {problem}", param=param)


def too_long(param: str, error: RequestTooLong) -> ApiError:
    """A 400 error for a field whose prompt is too long, without advice on the server's settings."""
    message = f"{param}: {error}".removesuffix(error.settings_advice)
    return ApiError(400, message, param=param, code="context_length_exceeded")


@contextmanager
def attribute_errors_to(param: str) -> Iterator[None]:
    """Turn errors raised inside into 400 errors for the field `param`."""
    try:
        yield
    except RequestTooLong as error:
        raise too_long(param, error) from error
    except (InvalidRequest, ModelError) as error:
        message = str(error) if str(error).startswith(param) else f"{param}: {error}"
        raise ApiError(400, message, param=param) from error


def rename_param(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with its field renamed, for an API that uses another name for the field."""
    name = names.get(error.param or "")
    if name is None:
        return error
    message = str(error).replace(str(error.param), name, 1)
    return ApiError(error.status, message, param=name, code=error.code, headers=error.headers)


def format_value(value: object) -> str:
    """A wrong value as JSON, cut to MAX_SHOWN_CHARACTERS."""
    text = ""
    for piece in ENCODER.iterencode(value):  # the whole value may be many megabytes long
        text += piece[: MAX_SHOWN_CHARACTERS + 1]
        if len(text) > MAX_SHOWN_CHARACTERS:
            return f"{text[:MAX_SHOWN_CHARACTERS]}..."
    return text


def api_error(error: Exception, *, is_closing: bool = False) -> ApiError:
    """Map an exception to an error response. Unknown exceptions are logged and become a 500."""
    match error:
        case ApiError():
            return error
        case Overloaded() if is_closing:
            return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "1"})
        case Overloaded():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(429, str(error), code="overloaded", headers=wait)
        case RequestError():
            message = REQUEST_ID_PREFIX.sub("", str(error), count=1)
            return ApiError(400, message, param=_field_of(message))
        case ModelError():  # the model lacks something, such as a chat template
            return ApiError(400, str(error))
        case PolicyError():  # the operator's policy failed; the request is not at fault
            log.error("request refused: %s", error)
            return ApiError(500, str(error), code="policy_failed")
        case ExecutorError():
            return ApiError(503, str(error), code="engine_gone")
        case TimeoutError():
            message = "the request exceeded the server's time limit (--timeout)"
            return ApiError(504, message, code="timeout")
    log.error("request failed", exc_info=error)
    return ApiError(500, f"internal server error: {type(error).__name__}", code="internal_error")


def lowercase_first(message: str) -> str:
    """The message with a lowercase first letter, for use inside another sentence."""
    return message[:1].lower() + message[1:]


def _field_of(message: str) -> str | None:
    """The field name that an engine error message begins with; None if there is none."""
    found = FIELD.match(message)
    return found[1] if found and found[1] not in NOT_FIELDS else None
