"""Random requests generated from the OpenAPI schema get responses that conform to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, settings

from tests.support import served

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks  # noqa: E402

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
FILLED: dict[str, Any] = {
    "prompt": "a prompt",
    "input": "an input",
    "messages": [{"role": "user", "content": "a message"}],
}
seen: dict[str, set[int]] = {}  # statuses by operation


async def _schema() -> dict[str, Any]:
    async with served.server() as server:
        return server.app.openapi()


class Listening(uvicorn.Server):
    """A server that signals when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.url: Future[str] = Future()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        self.url.set_result(f"http://127.0.0.1:{port}")


async def _serve(begun: Future[Listening]) -> None:
    async with served.server() as server:
        listening = Listening(uvicorn.Config(server.app, port=0, log_level="error", lifespan="off"))
        begun.set_result(listening)
        await listening._serve()  # not serve(), which would install signal handlers
        await server.settled()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a thread; at the end no request is open, and some have succeeded."""
    begun: Future[Listening] = Future()
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, _serve(begun))
        listening = begun.result(10)
        yield listening.url.result(10)
        listening.should_exit = True
        ended.result(10)
    assert all(200 in statuses for label, statuses in seen.items() if label.startswith("POST"))


def _make_possible(body: dict[str, Any]) -> None:
    """Fix what a schema cannot express, so that some requests reach the engine."""
    for name in [name for name, value in body.items() if value in ("", [], {})]:
        body[name] = FILLED.get(name)
    if isinstance(body.get("model"), str):
        body["model"] = served.MODEL
    if type(body.get("dimensions")) is int:
        body["dimensions"] = served.HIDDEN_SIZE
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and not 1 <= body[name] <= 64:
            body[name] = 4
    for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if body.get(name) is not None and body.get(needed) in (None, False):
            body[needed] = True
    for message in body["messages"] if isinstance(body.get("messages"), list) else ():
        if isinstance(message, dict) and message.get("role") == "":
            message.update(FILLED["messages"][0])


@schemathesis.openapi.from_dict(asyncio.run(_schema())).parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_response_conforms_to_the_schema(case: Any, url: str) -> None:
    if isinstance(case.body, dict):
        _make_possible(case.body)
    response = case.call_and_validate(base_url=url, checks=CHECKS, timeout=20)
    seen.setdefault(case.operation.label, set()).add(response.status_code)
