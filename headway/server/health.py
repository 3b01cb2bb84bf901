"""Health checks: the engine is unhealthy if it has stopped, its steps fail, or work does not advance.

`Watchdog` reads plain attributes from a thread other than the engine's, so it works even during a
step that never returns. `RemoteWatchdog` queries the engine's process over a socket. That process
answers during a step too, so no answer means that the process itself is stuck.
"""

from __future__ import annotations

import asyncio

from headway.engine.async_engine import AsyncEngine
from headway.engine.loop import CachedReader, EngineLoop
from headway.engine.queries import GetProblem
from headway.engine.thread_client import ThreadClient
from headway.errors import ExecutorError

MAX_SILENCE = 30.0  # seconds without progress while there is work
MAX_WAIT = 1.0  # seconds that one health check waits for the engine's process


class Watchdog:
    """Watches an engine loop in this process."""

    def __init__(self, loop: EngineLoop, max_silence: float = MAX_SILENCE) -> None:
        self.max_silence = max_silence
        self._loop = loop
        self._explanation = CachedReader(loop.engine, loop.engine.why)
        loop.handle(GetProblem, lambda _: self.problem())

    async def __call__(self, engine: AsyncEngine) -> str | None:
        return self.problem()

    def problem(self) -> str | None:
        """A description of the problem; None if the engine is healthy. Callable from any thread."""
        engine, loop = self._loop.engine, self._loop
        if loop.ended is not None:
            return f"the engine has stopped: {loop.ended}"
        if engine.has_given_up:
            return engine.stop_message
        has_work = engine.has_work  # read first: the time is set before work arrives
        seconds = engine.seconds_since_progress
        if has_work and seconds > self.max_silence:
            explanation = self._explanation.get()[0]
            return f"no progress for {seconds:.1f} s although there is work.\n{explanation}"
        # Without work, no step can show that the engine has recovered: a fault then expires.
        if engine.fault is not None and (has_work or seconds <= self.max_silence):
            return f"the latest step failed: {engine.fault}"
        return None


class RemoteWatchdog:
    """Watches an engine in another process by querying that process's own watchdog."""

    def __init__(self, max_silence: float = MAX_SILENCE) -> None:
        self.max_silence = max_silence
        self._query: asyncio.Task[str | None] | None = None
        self._since = 0.0

    async def __call__(self, engine: AsyncEngine) -> str | None:
        """A description of the problem; None if healthy, or silent for less than `max_silence`."""
        now = asyncio.get_running_loop().time
        if self._query is None:
            self._query, self._since = asyncio.create_task(engine.ask(GetProblem())), now()
        query = self._query
        await asyncio.wait([query], timeout=min(MAX_WAIT, self.max_silence))
        if not query.done():
            silent = now() - self._since
            is_stuck = silent >= self.max_silence
            return f"the engine has not answered for {silent:.1f} s" if is_stuck else None
        if self._query is query:  # a concurrent check may already have started another query
            self._query = None
        try:
            return query.result()
        except ExecutorError as error:
            return str(error)


def watch(engine: AsyncEngine, max_silence: float = MAX_SILENCE) -> Watchdog | RemoteWatchdog:
    """The watchdog for an engine in this process or in another one."""
    if isinstance(engine.client, ThreadClient):
        return Watchdog(engine.client.loop, max_silence)
    return RemoteWatchdog(max_silence)
