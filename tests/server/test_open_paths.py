"""Paths that need no key show nothing of the engine's requests and decisions."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from headway.engine.async_engine import AsyncEngine
from headway.server.app import create_app
from tests.support.served import server
from tests.support.waiting import on_loop

PROBLEM = "no progress for 31.0 s although there is work."
DECISION = "request chat-12 waits: it needs 5 free KV blocks; 2 available"


async def unhealthy(engine: AsyncEngine) -> str:
    return f"{PROBLEM}\n{DECISION}"


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("keys", [(), ("key",)])
@on_loop
async def test_a_failed_health_check_shows_decisions_only_if_no_key_is_set(
    keys: tuple[str, ...], path: str
) -> None:
    async with server(api_keys=keys) as here:
        app = create_app(replace(here.app.state.context, health=unhealthy))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.get(path)
    assert response.status_code == 503 and PROBLEM in response.text
    assert (DECISION in response.text) == (not keys)
