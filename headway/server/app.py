"""The FastAPI application: paths, response models and documented errors.

Does not start or stop the engine; the caller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from msgspec.structs import asdict
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headway import __version__
from headway.engine.messages import Query
from headway.engine.queries import GetLoad, GetMetrics, ResetPrefixCache
from headway.errors import ExecutorError
from headway.server.anthropic import protocol as anthropic
from headway.server.anthropic.messages import count_tokens, messages
from headway.server.context import Context
from headway.server.generation.request_fields import check_model
from headway.server.generation.stream import CompleteResponse, generate
from headway.server.http import validation_errors
from headway.server.http.errors import RETRY_AFTER, AnthropicErrorResponse, ApiError, ErrorResponse
from headway.server.http.json_body import JsonRoute
from headway.server.http.middleware import SecurityMiddleware
from headway.server.live import page
from headway.server.openai import protocol
from headway.server.openai import response_models as shapes
from headway.server.openai.chat import chat
from headway.server.openai.completions import completions
from headway.server.openai.embeddings import EmbeddingRequest, EmbeddingResponse, embeddings
from headway.server.openai.responses import responses
from headway.server.openai.responses_input import ResponsesRequest
from headway.server.openai.tokenize import detokenize, tokenize

ENGINE_TIMEOUT = 5.0  # seconds; only queries that change the engine wait for the running step
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = TypeVar("Value")
KEY = {"type": "http", "scheme": "bearer"}
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")  # readable by scripts of allowed web pages
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAMED: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"itemSchema": EVENT}}}}
DESCRIPTIONS = {
    400: "A field is wrong. The message names the field, the problem and the limit.",
    401: "The API key is missing or wrong.",
    403: "The Host header or the origin of the calling web page is not allowed.",
    404: "The model is not served. The message names the model that is.",
    408: "The body did not arrive in time.",
    409: "Running requests use the prefix cache, or Last-Event-ID is from another request.",
    410: "The stream of Last-Event-ID cannot be continued. Send the request without it.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "The queue is full. Retry after Retry-After seconds.",
    500: "An engine step failed.",
    503: "The engine has stopped or did not answer in time.",
    504: "The request exceeded the server's time limit.",
}
BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415)  # of all endpoints with a body
GENERATION_ERRORS = (*BODY_ERRORS, 409, 410, 429, 500, 503, 504)


class HeadwayApp(FastAPI):
    """FastAPI with a corrected OpenAPI schema."""

    needs_key = False

    def openapi(self) -> dict[str, Any]:
        """The schema without status 422, which is never sent, and with the API key if needed."""
        is_new = self.openapi_schema is None
        schema = super().openapi()  # cached
        if is_new:
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            if self.needs_key:
                schema["components"]["securitySchemes"] = {"key": KEY}
                schema["security"] = [{"key": []}]
        return schema


def create_app(context: Context, routers: Iterable[APIRouter] = ()) -> FastAPI:
    """The application that serves one model; `routers` adds further routes."""
    app = HeadwayApp(
        title="Headway", version=__version__, docs_url=None, redoc_url=None,
        description="OpenAI-compatible API of the Headway inference engine.",
    )  # fmt: skip
    app.needs_key = bool(context.settings.api_keys)
    app.state.context = context
    if context.input_processor.tokenizer is not None:
        context.input_processor.tokenizer.prepare()
    validation_errors.install(app)
    own = (_openai_routes, _anthropic_routes, _tokenizer_routes, _model_routes, _monitoring_routes)
    for router in (*(make(context) for make in own), *routers):
        app.include_router(router)
    app.add_middleware(SecurityMiddleware, settings=context.settings)
    if context.settings.allowed_origins:  # added last, so it runs first: preflights have no key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(context.settings.allowed_origins),
            # Allow any header: SDKs send many custom headers, and each version adds more.
            allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip
    return app


def _errors(*statuses: int, model: type = ErrorResponse) -> dict[int | str, Any]:
    return {status: {"model": model, "description": DESCRIPTIONS[status]} for status in statuses}


def _openai_routes(context: Context) -> APIRouter:
    errors = _errors(*GENERATION_ERRORS)
    router = APIRouter(prefix="/v1", responses=errors, route_class=JsonRoute)

    @router.post("/completions", response_model=shapes.CompletionResponse, responses=STREAMED)
    async def post_completions(body: protocol.CompletionRequest) -> Response:
        """Continue one or several prompts."""
        return generate(context, body.stream, partial(completions, context, body))

    @router.post("/chat/completions", response_model=shapes.ChatResponse, responses=STREAMED)
    async def post_chat(body: protocol.ChatRequest) -> Response:
        """Generate the next message of a conversation."""
        return generate(context, body.stream, partial(chat, context, body))

    @router.post("/embeddings", response_model=EmbeddingResponse)
    async def post_embeddings(body: EmbeddingRequest) -> Response:
        """Embed texts or token ids as unit vectors."""
        return CompleteResponse(context, lambda: embeddings(context, body))

    @router.post("/responses", response_model=shapes.ResponsesResponse, responses=STREAMED)
    async def post_responses(body: ResponsesRequest) -> Response:
        """Generate a response with OpenAI's Responses API. Responses are not stored."""
        return generate(context, body.stream, partial(responses, context, body))

    return router


def _anthropic_routes(context: Context) -> APIRouter:
    errors = _errors(*GENERATION_ERRORS, model=AnthropicErrorResponse)
    router = APIRouter(prefix="/v1", responses=errors, route_class=JsonRoute)

    @router.post("/messages", response_model=anthropic.MessagesResponse, responses=STREAMED)
    async def post_messages(body: anthropic.MessagesRequest) -> Response:
        """Generate the next message of a conversation with Anthropic's Messages API."""
        return generate(context, body.stream, partial(messages, context, body))

    @router.post("/messages/count_tokens", response_model=anthropic.CountResponse)
    async def post_count(body: anthropic.CountRequest) -> Response:
        """Count the tokens of a conversation."""
        return CompleteResponse(context, lambda: count_tokens(context, body))

    return router


def _tokenizer_routes(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(*BODY_ERRORS), route_class=JsonRoute)

    @router.post("/tokenize", response_model=shapes.TokenizeResponse)
    async def post_tokenize(body: protocol.TokenizeRequest) -> Response:
        """Return the tokens of a prompt or a conversation."""
        return CompleteResponse(context, lambda: tokenize(context, body))

    @router.post("/detokenize", response_model=shapes.DetokenizeResponse)
    async def post_detokenize(body: protocol.DetokenizeRequest) -> Response:
        """Return the text of tokens."""
        return CompleteResponse(context, lambda: detokenize(context, body))

    return router


def _model_routes(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(401))
    card = shapes.ModelCard(
        id=context.model_name, created=context.created, max_model_len=context.max_model_len
    )

    @router.get("/v1/models")
    async def get_models() -> shapes.ModelList:
        """List the served model."""
        return shapes.ModelList(data=[card])

    @router.get("/v1/models/{model:path}", responses=_errors(404))
    async def get_model(model: str) -> shapes.ModelCard:
        """Describe one model."""
        check_model(context, model)
        return card

    docs_page = page("docs.html", "docs.css", "docs.js")

    @router.get("/docs", include_in_schema=False)
    async def get_docs() -> Response:
        """A page that shows the OpenAPI schema."""
        return docs_page

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        """Return the version of Headway."""
        return {"version": __version__}

    return router


def _monitoring_routes(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(401))
    engine, settings = context.engine, context.settings

    @router.get("/health", responses=_errors(503))
    async def get_health() -> dict[str, str]:
        """Check that the engine runs and makes progress."""
        if problem := await context.health(engine):
            # The lines after the first explain decisions about requests, and this path is open.
            shown = problem.partition("\n")[0] if settings.api_keys else problem
            raise ApiError(503, shown, code="unhealthy")
        if warning := engine.warning:
            return {"status": "degraded", "reason": warning.partition("\n")[0]}
        return {"status": "ok"}

    @router.get("/ping", responses=_errors(503))
    @router.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        """Alias of /health that some platforms expect."""
        return await get_health()

    @router.get("/load", responses=_errors(503))
    async def get_load() -> dict[str, int | float]:
        """Count open, running and waiting requests; `age` is the age of the counts in seconds."""
        load = await _ask(context, GetLoad())
        return {"server_load": engine.num_open, **asdict(load)}

    @router.post("/reset_prefix_cache", responses=_errors(409, 503))
    async def post_reset() -> dict[str, bool]:
        """Drop all cached prefixes. Fails with 409 while requests run. Waits for the running step.

        After a 503 with the code engine_busy, the reset may still happen when that step ends.
        """
        if not await _ask(context, ResetPrefixCache()):
            raise ApiError(409, "running requests use cached blocks; retry when none is running")
        return {"success": True}

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", responses=_errors(503), response_class=Response)
    async def get_metrics() -> Response:
        """Return metrics in Prometheus text format."""
        text = await _ask(context, GetMetrics(settings.metrics_prefix))
        return Response(text, media_type=METRICS_TYPE)

    return router


async def _ask(context: Context, query: Query[Value]) -> Value:
    """The engine's answer; ApiError 503 if it has stopped or does not answer in time."""
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT):
            return await context.engine.ask(query)
    except TimeoutError:
        busy = f"the engine has not answered for {ENGINE_TIMEOUT:g} s; a step is running"
        raise ApiError(503, busy, code="engine_busy", headers=RETRY_AFTER) from None
    except ExecutorError as error:
        if context.engine.stop_reason is None:
            raise ApiError(500, str(error), code="internal_error") from error
        raise
