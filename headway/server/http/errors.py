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
from typing import Literal

from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from headway.errors import (
    ExecutorError,
    InvalidRequest,
    ModelError,
    NoReplica,
    NotResumable,
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
# The field name that a message of the engine begins with, rather than one of these words.
FIELD = re.compile(r"(?!(?:request|the|this|client|text|a|an)\b)[a-z][a-z_]*(?=[\s:\[.])")
ANTHROPIC_PATH = "/v1/messages"
RETRY_AFTER = {"Retry-After": "1"}  # seconds
NO_REPLICA = 503, "no_replica"
COMMON_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_error", 504: "timeout_error",
}  # fmt: skip
OPENAI_TYPES = {**COMMON_TYPES, 503: "service_unavailable_error"}
ANTHROPIC_TYPES = {**COMMON_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorBody


class AnthropicErrorBody(TypedDict):
    type: str
    message: str


class AnthropicErrorResponse(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorBody


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
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorResponse:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = OPENAI_TYPES.get(self.status, default)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def anthropic_body(self) -> AnthropicErrorResponse:
        """The body in the format of Anthropic's API."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response_at(self, path: str) -> Response:
        """The response in the format of the API that serves `path`."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        return Response(to_json(body), self.status, self.headers, "application/json")


def field_error(place: str, problem: str) -> ApiError:
    """A 400 error for a place in the body, such as `input[0].role`: the place, then `problem`."""
    return ApiError(400, f"{place} {problem}", param=re.split(r"[.\[]", place, maxsplit=1)[0])


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


@contextmanager
def rename_params(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors raised inside use these names of fields, as another API has them."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        found = api_error(error)
        if name := names.get(found.param or ""):
            message = str(found).replace(str(found.param), name, 1)
            found = ApiError(
                found.status, message, param=name, code=found.code, headers=found.headers
            )
        raise found from error


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
            return ApiError(503, str(error), code="shutting_down", headers=RETRY_AFTER)
        case Overloaded() | NoReplica():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            status, code = (429, "overloaded") if isinstance(error, Overloaded) else NO_REPLICA
            return ApiError(status, str(error), code=code, headers=wait)
        case NotResumable():
            code = "resumes_another" if error.differs else "not_resumable"
            return ApiError(409 if error.differs else 410, str(error), code=code)
        case RequestError():
            message = REQUEST_ID_PREFIX.sub("", str(error), count=1)
            field = FIELD.match(message)
            return ApiError(400, message, param=field and field[0])
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
