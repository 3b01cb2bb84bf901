"""Valid and invalid values of every field of the OpenAPI schema get responses that conform to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, settings
from hypothesis.internal import charmap
from hypothesis.internal.intervalsets import IntervalSet

from tests.support import served

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
)  # fmt: skip
FILLED: dict[str, Any] = {
    "prompt": "a prompt",
    "input": "an input",
    "messages": [{"role": "user", "content": "a message"}],
}
ONCE = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Listening(uvicorn.Server):
    """A server that signals when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.url: Future[str] = Future()
        self.schema: dict[str, Any] = {}

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        self.url.set_result(f"http://127.0.0.1:{port}")


async def _serve(begun: Future[Listening]) -> None:
    async with served.server() as server:
        listening = Listening(uvicorn.Config(server.app, port=0, log_level="error", lifespan="off"))
        listening.schema = server.app.openapi()
        begun.set_result(listening)
        await listening._serve()  # not serve(), which would install signal handlers
        await server.settled()


@pytest.fixture(scope="module")
def quick_texts() -> Iterator[None]:
    """Which characters UTF-8 can encode, which Hypothesis finds out by trying all of them."""
    encoded = IntervalSet([(0, 0xD7FF), (0xE000, 0x10FFFF)])  # all but surrogates
    find, known = charmap.intervals_from_codec, {"utf-8": (encoded, IntervalSet([]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charmap, "intervals_from_codec", lambda name: known.get(name) or find(name))
        yield


@pytest.fixture(scope="module")
def schema(quick_texts: None) -> Iterator[Any]:
    """The schema of a server on a thread; at the end no request is open."""
    schemathesis = pytest.importorskip(
        "schemathesis"
    )  # not above: every process collects the tests
    begun: Future[Listening] = Future()
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, _serve(begun))
        listening = begun.result(10)
        loaded = schemathesis.openapi.from_dict(listening.schema)
        loaded.config.update(base_url=listening.url.result(10))
        loaded.config.phases.fuzzing.enabled = False  # test_http.py sends random bodies
        yield loaded
        listening.should_exit = True
        ended.result(10)


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


def test_every_response_conforms_to_the_schema(schema: Any) -> None:
    import requests
    from schemathesis import checks
    from schemathesis.pytest.lazy import get_all_tests

    own_checks = [getattr(checks, name) for name in CHECKS]
    with requests.Session() as session:
        session.trust_env = False  # no search for proxies
        seen: dict[str, set[int]] = {}  # statuses by operation
        sent: set[str] = set()

        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                _make_possible(case.body)
            request = repr(
                (case.operation.label, case.path_parameters, case.query, case.headers,
                 case.cookies, case.media_type, case.body)
            )  # fmt: skip
            if request in sent:  # _make_possible makes requests alike
                return
            sent.add(request)
            response = case.call_and_validate(session=session, checks=own_checks, timeout=20)
            seen[case.operation.label].add(response.status_code)

        # Not `@schema.parametrize`, which would generate all requests during collection.
        tests = get_all_tests(schema=schema, test_func=check, settings=ONCE, given_kwargs=None)
        for operation, test in (found.ok() for found in tests):
            seen[operation.label] = set[int]()
            test()
            assert seen[operation.label]
    assert all(200 in statuses for label, statuses in seen.items() if label.startswith("POST"))
