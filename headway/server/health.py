"""Is the engine alive? Not if it has ended, keeps failing, or work waits and nothing moves.

A watchdog reads plain attributes from another thread than the engine's, so that it can tell even
of a step that never returns. NotConsidered a socket the engine's process is asked; it answers also during
a step, so silence means that the process itself is stuck.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headway.engine.async_engine import AsyncEngine, ThreadPort
from headway.engine.loop import EngineLoop, Latest
from headway.errors import ConfigError, ExecutorError

PATIENCE = 30.0  # seconds without any progress while work waits
QUICK = 1.0  # seconds within which a question about health is answered, one way or the other


class Watchdog:
    """Watches a loop in this process."""

    def __init__(self, loop: EngineLoop, patience: float = PATIENCE) -> None:
        self.patience = _checked(patience)
        self._loop = loop
        self._explained = Latest(loop.engine, loop.engine.why)
        loop.observations["problem"] = lambda _: self.problem()

    async def __call__(self, engine: AsyncEngine) -> str | None:
        return self.problem()

    def problem(self) -> str | None:
        """What is wrong; None if nothing is. From any thread, at any time."""
        engine, loop = self._loop.engine, self._loop
        if loop.ended is not None:
            return f"the engine has ended: {loop.ended}"
        if engine.has_given_up:
            return f"too many steps have failed in a row, the latest so: {engine.fault}"
        idle = engine.idle
        if engine.has_work and idle > self.patience:
            return f"work waits and nothing has moved for {idle:.1f} s.\n{self._explained.get()[0]}"
        # An engine without work cannot show that it is well again: then a fault counts for a while.
        if engine.fault is not None and (engine.has_work or idle <= self.patience):
            return f"the latest step failed: {engine.fault}"
        return None


class RemoteWatchdog:
    """Watches an engine in another process, whose own watchdog answers also during a step."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = _checked(patience)
        self._asking: asyncio.Task[Any] | None = None
        self._since = 0.0

    async def __call__(self, engine: AsyncEngine) -> str | None:
        """What is wrong; None if nothing is, or if the process has been silent only for a moment."""
        now = asyncio.get_running_loop().time
        if self._asking is None:
            self._asking, self._since = asyncio.create_task(engine.ask("problem")), now()
        asked = self._asking
        await asyncio.wait([asked], timeout=min(QUICK, self.patience))
        if not asked.done():
            silent = now() - self._since
            return f"the engine is silent for {silent:.1f} s" if silent >= self.patience else None
        if self._asking is asked:  # or somebody else, who waited too, has asked again
            self._asking = None
        try:
            answer: str | None = asked.result()
        except ExecutorError as error:
            return str(error)
        return answer


def watch(engine: AsyncEngine, patience: float = PATIENCE) -> Watchdog | RemoteWatchdog:
    """The watchdog for an engine, wherever it runs."""
    if isinstance(engine.port, ThreadPort):
        return Watchdog(engine.port.loop, patience)
    return RemoteWatchdog(patience)


def _checked(patience: float) -> float:
    if not patience > 0:
        raise ConfigError(f"a watchdog's patience must be above 0 seconds, not {patience!r}")
    return patience
