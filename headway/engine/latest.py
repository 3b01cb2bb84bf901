"""Values read from a running engine without waiting for its step, each with its age.

The engine's lock is free while a plan runs, so another thread reads a consistent state even during
a step of a minute. If the scheduler itself holds the lock for long, the value read last is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headway.engine.engine import Engine

Value = TypeVar("Value")
PATIENCE = 0.05  # seconds for the scheduler to release the lock


class Latest(Generic[Value]):
    """The latest value of `read`, a function that reads the engine's state and changes nothing."""

    def __init__(self, engine: Engine, read: Callable[[], Value]) -> None:
        self._engine, self._read = engine, read
        with engine.lock:
            self._value, self._as_of = read(), engine.clock.now()

    def get(self) -> tuple[Value, float]:
        """The value and its age in seconds: how long ago the state it shows was current.

        While a step runs, the state is that of the step's start. May be called on any thread.
        """
        engine = self._engine
        if engine.lock.acquire(timeout=PATIENCE):
            try:
                self._value, began = self._read(), engine.step_began
                self._as_of = engine.clock.now() if began is None else began
            finally:
                engine.lock.release()
        return self._value, max(0.0, engine.clock.now() - self._as_of)
