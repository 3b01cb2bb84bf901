"""Access control: Host and Origin headers of browsers, and both forms of API keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.cli.options.serve import ServeOptions
from headway.options import EngineOptions
from headway.server.http.middleware import SecurityMiddleware
from headway.server.http.origins import host_name
from headway.server.settings import Settings
from tests.server.test_http import CHAT, COMPLETIONS, HELLO, error
from tests.support.served import Server, server, with_server
from tests.support.waiting import on_loop

PAGE = "http://page.example:3000"
OPENAI_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version,x-stainless-timeout,x-stainless-helper-method"
)
ANTHROPIC_HEADERS = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,"
    "x-api-key,x-stainless-arch"
)
LOCAL: dict[str, Any] = {"allowed_hosts": ("localhost", "127.0.0.1", "::1", "test")}


def preflight(origin: str, headers: str) -> dict[str, str]:
    """The headers of a CORS preflight request."""
    return {
        "origin": origin, "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }  # fmt: skip


@pytest.mark.parametrize("headers", [OPENAI_HEADERS, ANTHROPIC_HEADERS])
@with_server(allowed_origins=(PAGE,), api_keys=("k",))
async def test_allowed_pages_may_send_any_header(here: Server, headers: str) -> None:
    response = await here.client.options(CHAT, headers=preflight(PAGE, headers))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    allowed = response.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert set(headers.split(",")) <= set(allowed)
    foreign = preflight("http://foreign.example", headers)
    response = await here.client.options(CHAT, headers=foreign)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


@with_server(allowed_origins=(PAGE,))
async def test_allowed_pages_may_read_request_id_and_retry_after(here: Server) -> None:
    response = await here.client.get("/version", headers={"origin": PAGE})
    exposed = response.headers["access-control-expose-headers"].lower()
    assert {"x-request-id", "retry-after"} <= {name.strip() for name in exposed.split(",")}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:8000", True), ("localhost.", True),
        ("[::1]:8000", True), ("[::1]", True), ("evil.example:8000", False), ("", False),
        ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("10.0.0.1", False),
    ],
)  # fmt: skip
@on_loop
async def test_a_loopback_server_checks_the_host_header(host: str, is_ours: bool) -> None:
    async with server(**LOCAL) as here:
        for path in ("/", "/health", "/v1/models"):
            response = await here.client.get(path, headers={"host": host})
            assert (response.status_code != 403) == is_ours, (path, response.text)
        response = await here.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"host": host})
        if is_ours:
            assert response.status_code == 200
        else:
            found = error(response, 403)
            assert found["param"] == "Host" and host_name(host) in found["message"]


def test_hosts_are_checked_by_default_only_on_loopback_without_a_key() -> None:
    def hosts(**options: Any) -> set[str]:
        return set(ServeOptions(**options).options(EngineOptions()).settings.allowed_hosts)

    names = {"localhost", "127.0.0.1", "::1"}
    assert hosts() == names and hosts(host="localhost") == names
    assert hosts(host="127.0.0.5") == {*names, "127.0.0.5"}
    assert hosts(host="0.0.0.0") == hosts(api_key=["k"]) == hosts(host="gpu.lan") == {"*"}
    assert hosts(allowed_host=["a.example"]) == {"a.example"}
    assert hosts(host="0.0.0.0", allowed_host=["a.example"]) == {"a.example"}


FOREIGN = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://test:9999"},
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://test:9999", "sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
)
OWN = (
    {},
    {"origin": "http://test"},
    {"origin": "http://proxy.example", "sec-fetch-site": "same-origin"},
    {"origin": PAGE},
    {"origin": PAGE, "sec-fetch-site": "cross-site"},
)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@on_loop
async def test_foreign_pages_may_not_send_unsafe_requests(headers: dict[str, str]) -> None:
    async with server(allowed_origins=(PAGE,)) as here:
        assert error(await here.client.post("/reset_prefix_cache", headers=headers), 403)
        body: dict[str, Any] = {"messages": HELLO}
        found = error(await here.client.post(CHAT, json=body, headers=headers), 403)
        assert found["code"] == "origin_not_allowed"
        assert (await here.client.get("/version", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", OWN, ids=str)
@on_loop
async def test_own_pages_allowed_pages_and_programs_may_call(headers: dict[str, str]) -> None:
    async with server(allowed_origins=(PAGE,)) as here:
        for path, body in (("/reset_prefix_cache", None), (CHAT, {"messages": HELLO})):
            response = await here.client.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text


@on_loop
async def test_with_a_key_or_any_origin_allowed_no_origin_is_refused() -> None:
    async with server(api_keys=("k",)) as here:
        headers = {"origin": "http://evil.example", "authorization": "Bearer k"}
        response = await here.client.post("/reset_prefix_cache", headers=headers)
        assert response.status_code == 200
    async with server(allowed_origins=("*",)) as here:
        headers = {"origin": "http://evil.example"}
        response = await here.client.post("/reset_prefix_cache", headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("headers", "is_right"),
    [
        ({"x-api-key": "second"}, True),
        ({"x-api-key": "first", "authorization": "Basic abc"}, True),
        ({"x-api-key": "firs"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "Bearer first"}, False),
        ({"x-api-key": "first", "authorization": "Bearer wrong"}, False),
    ],
)
@on_loop
async def test_a_key_may_be_sent_as_x_api_key(headers: dict[str, str], is_right: bool) -> None:
    async with server(api_keys=("first", "second")) as here:
        response = await here.client.get("/v1/models", headers=headers)
        assert response.status_code == (200 if is_right else 401)


@on_loop
async def test_a_slow_body_closes_its_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail("the body is not complete")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    await SecurityMiddleware(app, Settings(body_timeout=0.05))(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
