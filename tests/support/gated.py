"""An engine, in real time unless a clock is given, whose steps a test can hold or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from headway import Engine, Plan, RealClock, Scheduler, StepResult, VirtualClock, preset
from headway.engine.messages import FromLoop, ToLoop
from headway.engine.thread_client import ThreadClient
from headway.executor.base import Handle
from headway.executor.simulated import Script, SimulatedExecutor
from headway.request import RequestParams
from tests.support.waiting import LIMIT

SIZES = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 64}


class WallClock(RealClock):
    """Real time that a simulated executor may use."""

    def advance_to(self, time: float) -> None:
        """Real time advances by itself."""


class Gate:
    """An executor whose steps end only while `open` is set. The next `num_faults` steps fail."""

    def __init__(self, clock: WallClock | VirtualClock) -> None:
        self._inner = SimulatedExecutor(clock, lambda plan: 0.0)
        self.open = threading.Event()
        self.open.set()
        self.num_faults = 0

    def launch(self, plan: Plan) -> Handle:
        if self.num_faults:
            self.num_faults -= 1
            raise OSError("device lost")
        return cast(Handle, SimpleNamespace(wait=lambda: self._wait(self._inner.launch(plan))))

    def _wait(self, handle: Any) -> StepResult:
        assert self.open.wait(LIMIT)
        result: StepResult = handle.wait()
        return result


def gated_engine(
    clock: WallClock | VirtualClock | None = None, **changes: Any
) -> tuple[Engine, Gate]:
    """An engine and the gate that holds its steps."""
    clock = clock or WallClock()
    gate = Gate(clock)
    return Engine(Scheduler(preset("vllm_v1", **{**SIZES, **changes})), gate, clock), gate


def scripted(num_output: int = 5, **more: Any) -> RequestParams:
    """Parameters of a request that generates this many tokens."""
    return RequestParams(max_tokens=num_output, sampling=Script(num_output, 7, 1), **more)


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
