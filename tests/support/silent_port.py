"""A port to an engine that can stop responding."""

from __future__ import annotations

from collections.abc import Callable

from headway.engine.async_engine import ThreadPort
from headway.engine.messages import FromLoop, ToLoop


class SilentPort:
    """Behaves like an engine in another process. While `is_silent` is set it drops messages."""

    def __init__(self, port: ThreadPort) -> None:
        self._port = port
        self.is_silent = False

    async def open(self, receive: Callable[[list[FromLoop]], None]) -> None:
        await self._port.open(receive)

    def send(self, messages: list[ToLoop]) -> None:
        if not self.is_silent:
            self._port.send(messages)

    async def close(self) -> None:
        await self._port.close()
