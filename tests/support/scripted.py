"""An engine without a model, and a small app for it; each request has a script of its tokens.

Everything can be pickled by name and few modules are imported, so tests can start processes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any

from headway import AsyncEngine, Engine, Plan, RealClock, Scheduler, preset
from headway.engine.loop import EngineLoop
from headway.engine.messages import Query
from headway.engine.queue_limits import QueueLimits
from headway.errors import HeadwayError
from headway.executor.simulated import Script, SimulatedExecutor
from headway.request import RequestParams
from headway.server.http import connection
from headway.server.process import shutdown, workers
from headway.server.process.serve import (
    ServedEngine,
    ServerFactory,
    bind,
    do_nothing,
    serve_single_process,
)
from headway.server.settings import Settings
from tests.support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
END = 9
SMALL = {"block_size": 4, "num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class SleepingClock(RealClock):
    """Real time; a simulated step sleeps for its duration."""

    def advance_to(self, time_: float) -> None:
        if time_ > self.now():
            time.sleep(max(0.0, time_ - self.now()))  # it may pass between the two calls


def make_engine(seconds: float = 0.0, async_scheduling: int = 0, **changes: Any) -> Engine:
    """An engine whose steps take this many seconds."""
    clock, scheduler = SleepingClock(), Scheduler(preset("headway", **{**SMALL, **changes}))
    return Engine(
        scheduler,
        SimulatedExecutor(clock, lambda plan: seconds),
        clock,
        async_scheduling=async_scheduling,
    )


def script(num_output: int, filler: int = 1, **more: Any) -> RequestParams:
    """RequestParams of a request that generates `filler` tokens, then END."""
    more = {"max_tokens": num_output + 1, **more}
    asked = Script(num_output=num_output, filler=filler, end=END)
    return RequestParams(sampling=asked, eos_ids=frozenset({END}), **more)


class Breaking:
    """An executor with launches that raise."""

    def __init__(self, engine: Engine, is_bad: Callable[[Plan], bool]) -> None:
        self._inner, self._is_bad = engine.executor, is_bad
        engine.executor = self

    def launch(self, plan: Plan) -> Any:
        if self._is_bad(plan):
            raise RuntimeError("the device was lost")
        return self._inner.launch(plan)


class Stepped:
    """An executor that holds every launch until a test allows it."""

    def __init__(self, engine: Engine) -> None:
        self._inner, self._changed = engine.executor, threading.Condition()
        self._num_allowed = 0.0
        self.is_holding = False
        engine.executor = self

    def allow(self, num_launches: float) -> None:
        with self._changed:
            self._num_allowed += num_launches
            self.is_holding = False
            self._changed.notify()

    def free(self) -> None:
        """Allow all launches from now on."""
        self.allow(inf)

    def launch(self, plan: Plan) -> Any:
        with self._changed:
            self.is_holding = not self._num_allowed
            assert self._changed.wait_for(lambda: self._num_allowed, LIMIT)
            self._num_allowed -= 1
        return self._inner.launch(plan)


def served(seconds: float = 0.0, limits: QueueLimits | None = None, **changes: Any) -> ServedEngine:
    engine = make_engine(seconds, **changes)
    return ServedEngine(
        engine=engine, model_info={"model": "none"}, limits=limits, prepare=answer_pid
    )


class GetPid(Query[int]):
    """The engine's process."""

    between_steps = True


class Double(Query[int]):
    """Twice a value."""

    value: int
    between_steps = True


def answer_pid(loop: EngineLoop) -> None:
    loop.handle(GetPid, lambda _: os.getpid())


Send = Callable[[dict[str, Any]], Awaitable[None]]


class MiniApp:
    """POST {id, prompt, num_output}: answers with a JSON line for every update and for the end."""

    def __init__(self, engine: AsyncEngine, facts: Any) -> None:
        self.engine, self.facts = engine, facts

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "GET":
            answer = {
                "engine": await self.engine.ask(GetPid()),
                "worker": os.getpid(),
                **self.facts,
            }
            await _line(send, answer)
        else:
            await self._stream(json.loads(body), send)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, asked: dict[str, Any], send: Send) -> None:
        params = script(asked["num_output"], asked.get("filler", 1))
        padding = "." * asked.get("padding", 0)
        try:
            async for updates in self.engine.stream(asked["id"], asked["prompt"], params):
                for update in updates:
                    await _line(send, {"tokens": update.tokens, "padding": padding})
                    if update.end is not None:
                        await _line(send, {"end": update.end.reason, "error": update.end.error})
        except HeadwayError as error:
            await _line(send, {"end": "refused", "error": str(error)})


async def _line(send: Send, value: Any) -> None:
    line = json.dumps(value).encode() + b"\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})


def mini_served(seconds: float) -> ServedEngine:
    return served(seconds, max_num_seqs=64, max_num_batched_tokens=256, num_blocks=20_000)


def patient() -> Callable[[], None]:
    """Set up a process of a server: a pause of it or of its client must not change the result."""
    connection.LINGER = shutdown.DRAIN_TIMEOUT = workers.DRAIN_TIMEOUT = 10 * LIMIT
    return do_nothing


def main(given: str) -> None:
    """Serve in this process, or in several if num_workers is set; prints the port."""
    options = json.loads(given)
    factory = ServerFactory(
        make_engine=partial(mini_served, options["seconds"]), make_app=MiniApp,
        grace=options["grace"], settings=Settings(**options["connections"]),
        setup=patient,
    )  # fmt: skip
    if options["is_real"]:
        from tests.support.lettered import real_factory

        factory = real_factory(options)
    if options["factory"]:
        module, _, name = options["factory"].partition(":")
        factory = getattr(import_module(module), name)(options)
    if options["max_descriptors"]:
        setrlimit(RLIMIT_NOFILE, (options["max_descriptors"],) * 2)
    factory.setup()
    bound = bind("127.0.0.1", options["port"])
    number = bound.getsockname()[1]

    def ready(facts: Any) -> None:
        print(number, flush=True)

    if options["num_workers"]:
        sys.exit(workers.Supervisor(factory, bound, options["num_workers"]).run(ready))
    sys.exit(serve_single_process(factory, bound, ready))
