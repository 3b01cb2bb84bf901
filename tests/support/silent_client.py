"""A client of an engine that can stop responding."""

from __future__ import annotations

from collections.abc import Callable

from headway.engine.messages import FromLoop, ToLoop
from headway.engine.thread_client import ThreadClient


class SilentClient:
    """Behaves like an engine in another process. While `is_silent` is set it drops messages."""

    def __init__(self, client: ThreadClient) -> None:
        self._client = client
        self.is_silent = False

    async def open(self, on_messages: Callable[[list[FromLoop]], None]) -> None:
        await self._client.open(on_messages)

    def send(self, messages: list[ToLoop]) -> None:
        if not self.is_silent:
            self._client.send(messages)

    async def close(self) -> None:
        await self._client.close()
