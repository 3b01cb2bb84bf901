"""The endpoints: which path does what, with what answers and errors.

Starts and ends no engine: whoever runs the server does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headway import __version__
from headway.errors import ExecutorError
from headway.server.anthropic.messages import count_tokens, messages
from headway.server.anthropic.messages_input import CountRequest, MessagesRequest
from headway.server.context import Context
from headway.server.generation.request_fields import check_model
from headway.server.generation.stream import Whole
from headway.server.http import validation_errors as problems
from headway.server.http.errors import ApiError, api_error
from headway.server.http.json_body import ReadRoute
from headway.server.http.security import Guard
from headway.server.openai import tokenize as tokens
from headway.server.openai.chat import chat
from headway.server.openai.completions import completions
from headway.server.openai.embeddings import EmbeddingRequest, EmbeddingResponse, embeddings
from headway.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)  # fmt: skip
from headway.server.openai.response_models import (
    AnthropicErrorResponse,
    ChatResponse,
    CompletionResponse,
    CountResponse,
    DetokenizeResponse,
    ErrorResponse,
    MessagesResponse,
    ModelCard,
    ModelList,
    ResponsesResponse,
    TokenizeResponse,
)
from headway.server.openai.responses import responses
from headway.server.openai.responses_input import ResponsesRequest
from headway.server.pages import page

ANSWERS_WITHIN = 5.0  # seconds; only what changes the engine waits for the running step
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEY = {"type": "http", "scheme": "bearer"}
EXPOSED_HEADERS = ("X-Request-Id", "Retry-After")  # scripts of web pages may read these
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS = {"text/event-stream": {"itemSchema": EVENT}}
WHY = {
    400: "A field is wrong; the message names it, its problem and the limit.",
    401: "The API key is missing or wrong.",
    403: "The Host, or the web page that calls, is not allowed.",
    404: "The model is not served here; the message lists those that are.",
    408: "The body did not arrive in time.",
    409: "Requests hold what was to be dropped.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    429: "Too much waits; come again after Retry-After seconds.",
    500: "A step of the engine failed.",
    503: "The engine has ended, or does not answer in time.",
    504: "The request took longer than the server allows.",
}
ASKED = (400, 401, 403, 404, 408, 413, 415)  # of everything with a body
GENERATED = (*ASKED, 429, 500, 503, 504)


class Server(FastAPI):
    """FastAPI with a schema that says what this server does."""

    needs_key = False

    def openapi(self) -> dict[str, Any]:
        """Without 422, which is never sent, and with the API key where one is needed."""
        if self.openapi_schema is None:
            schema = super().openapi()
            for methods in schema["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            if self.needs_key:
                schema["components"]["securitySchemes"] = {"key": KEY}
                schema["security"] = [{"key": []}]
        assert self.openapi_schema is not None, "made above"
        return self.openapi_schema


def create_app(context: Context, routers: Iterable[APIRouter] = ()) -> FastAPI:
    """The server of one model; `routers` are further pages."""
    app = Server(
        title="Headway", version=__version__, docs_url=None, redoc_url=None,
        description="An OpenAI-compatible server of the Headway engine.",
    )  # fmt: skip
    app.needs_key = bool(context.settings.api_keys)
    app.state.context = context
    if context.asking.tokenizer is not None:
        context.asking.tokenizer.prepare()
    problems.install(app)
    ours = (_generating, _anthropic, _tokenizing, _naming, _watching)
    for router in (*(make(context) for make in ours), *routers):
        app.include_router(router)
    app.add_middleware(Guard, settings=context.settings)
    if context.settings.allowed_origins:  # outside the guard: a browser's first question has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(context.settings.allowed_origins),
            # Any header: SDKs send many of their own, and new ones with every version.
            allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS,
        )  # fmt: skip
    return app


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {each: {"model": ErrorResponse, "description": WHY[each]} for each in statuses}


def _generating(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_errors(*GENERATED), route_class=ReadRoute)
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": EVENTS}}

    @router.post("/completions", response_model=CompletionResponse, responses=streamed)
    async def post_completions(body: CompletionRequest) -> Response:
        """Go on from one or several prompts."""
        return completions(context, body)

    @router.post("/chat/completions", response_model=ChatResponse, responses=streamed)
    async def post_chat(body: ChatRequest) -> Response:
        """Answer a conversation."""
        return chat(context, body)

    @router.post("/embeddings", response_model=EmbeddingResponse)
    async def post_embeddings(body: EmbeddingRequest) -> Response:
        """Turn texts or token ids into vectors of length 1."""
        return embeddings(context, body)

    @router.post("/responses", response_model=ResponsesResponse, responses=streamed)
    async def post_responses(body: ResponsesRequest) -> Response:
        """Answer a conversation, as OpenAI's newer API does; responses are not stored."""
        return responses(context, body)

    return router


def _anthropic(context: Context) -> APIRouter:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicErrorResponse, "description": WHY[status]}
        for status in GENERATED
    }
    router = APIRouter(prefix="/v1", responses=errors, route_class=ReadRoute)
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": EVENTS}}

    @router.post("/messages", response_model=MessagesResponse, responses=streamed)
    async def post_messages(body: MessagesRequest) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        return messages(context, body)

    @router.post("/messages/count_tokens", response_model=CountResponse)
    async def post_count(body: CountRequest) -> Response:
        """Count a conversation's tokens."""
        return Whole(context, lambda: count_tokens(context, body))

    return router


def _tokenizing(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(*ASKED), route_class=ReadRoute)

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def post_tokenize(body: TokenizeRequest) -> Response:
        """A prompt's or a conversation's tokens."""
        return Whole(context, lambda: tokens.tokenize(context, body))

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def post_detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        return Whole(context, lambda: tokens.detokenize(context, body))

    return router


def _naming(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(401))
    card = ModelCard(
        id=context.model_name, created=context.created, max_model_len=context.max_model_len
    )

    @router.get("/v1/models")
    async def get_models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[card])

    @router.get("/v1/models/{model:path}", responses=_errors(404))
    async def get_model(model: str) -> ModelCard:
        """One model."""
        check_model(context, model)
        return card

    described = page("docs.html", "docs.css", "docs.js")

    @router.get("/docs", include_in_schema=False)
    async def get_docs() -> Response:
        """A page that shows the schema."""
        return described

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        """The version of Headway."""
        return {"version": __version__}

    return router


def _watching(context: Context) -> APIRouter:
    router = APIRouter(responses=_errors(401))
    engine, settings = context.engine, context.settings

    @router.get("/health", responses=_errors(503))
    async def get_health() -> dict[str, str]:
        """Whether the engine lives and gets on with what waits."""
        if problem := await context.health(engine):
            raise ApiError(503, problem, code="unhealthy")
        return {"status": "ok"}

    @router.get("/ping", responses=_errors(503))
    @router.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        """The same as /health, under the name that some platforms ask for."""
        return await get_health()

    @router.get("/load", responses=_errors(503))
    async def get_load() -> dict[str, int | float]:
        """Requests open at this process, running and waiting in the engine; age in seconds."""
        return {"server_load": engine.num_open, **await _ask(context, "load")}

    @router.post("/reset_prefix_cache", responses=_errors(409, 503))
    async def post_reset() -> dict[str, bool]:
        """Forget all cached prefixes; only while no request runs. Waits for the running step.

        After a 503 with the code engine_busy it may still be done when that step ends.
        """
        if not await _ask(context, "reset_prefix_cache"):
            raise ApiError(409, "requests are running and hold cached blocks; try again later")
        return {"success": True}

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", responses=_errors(503), response_class=Response)
    async def get_metrics() -> Response:
        """Prometheus' text."""
        text = await _ask(context, "metrics", settings.metrics_prefix)
        return Response(text, media_type=METRICS_TYPE)

    return router


async def _ask(context: Context, what: str, details: Any = None) -> Any:
    """The engine's answer; 503 if the engine has ended or does not answer in time."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            return await context.engine.ask(what, details)
    except TimeoutError:
        busy = f"the engine has not answered for {ANSWERS_WITHIN:g} s; a step is running"
        raise ApiError(503, busy, code="engine_busy", headers={"Retry-After": "1"}) from None
    except ExecutorError as error:
        if context.engine.gone is None:
            raise ApiError(500, str(error), code="internal_error") from error
        raise api_error(error) from error
