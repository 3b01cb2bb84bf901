"""Valid and invalid values of every field of the OpenAPI schema get responses that conform to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def quick_texts() -> Iterator[None]:
    """Which characters UTF-8 can encode, which Hypothesis finds out by trying all of them."""
    encoded = IntervalSet([(0, 0xD7FF), (0xE000, 0x10FFFF)])  # all but surrogates
    find, known = charmap.intervals_from_codec, {"utf-8": (encoded, IntervalSet([]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charmap, "intervals_from_codec", lambda name: known.get(name) or find(name))
        yield


@pytest.fixture(scope="module")
def schema(quick_texts: None) -> Iterator[tuple[Any, Any]]:
    """The schema of a server, and an adapter to its app; at the end no request is open."""
    # not above: every process collects the tests
    schemathesis = pytest.importorskip("schemathesis")
    from tests.support.app_adapter import AppAdapter

    with asyncio.Runner() as runner:
        serving = served.server()
        server = runner.run(serving.__aenter__())
        loaded = schemathesis.openapi.from_dict(server.app.openapi())
        loaded.config.update(base_url="http://server")
        loaded.config.phases.fuzzing.enabled = False  # test_http.py sends random bodies
        yield loaded, AppAdapter(server.app, runner.get_loop())
        runner.run(server.settled())
        runner.run(serving.__aexit__(None, None, None))


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


def test_every_response_conforms_to_the_schema(schema: tuple[Any, Any]) -> None:
    from requests import Request
    from schemathesis import checks
    from schemathesis.pytest.lazy import get_all_tests

    loaded, adapter = schema
    own_checks = [getattr(checks, name) for name in CHECKS]
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
        # What case.call_and_validate() does, with more work for sessions and redirects.
        response = adapter.send(Request(**case.as_transport_kwargs()).prepare())
        case.validate_response(response, checks=own_checks)
        seen[case.operation.label].add(response.status_code)

    # Not `@schema.parametrize`, which would generate all requests during collection.
    tests = get_all_tests(schema=loaded, test_func=check, settings=ONCE, given_kwargs=None)
    for operation, test in (found.ok() for found in tests):
        seen[operation.label] = set[int]()
        for example in reversed(test.hypothesis_explicit_examples):
            check(**example.kwargs)  # what test() does, which prepares each for a random test
        assert seen[operation.label]
    assert all(200 in statuses for label, statuses in seen.items() if label.startswith("POST"))
