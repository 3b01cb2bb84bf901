"""Follows a running engine: its present state, then a line for every step.

The engine only describes its steps, without token ids, while a page is open. The film is made by
the process that serves the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.queries import (
    EngineState,
    GetSteps,
    StartFollowing,
    StepLines,
    StopFollowing,
)
from headway.errors import ConfigError
from headway.observe.trace import Line, describe_request, describe_step, header
from headway.plan import StepReport
from headway.request import Request

MAX_VIEWERS = 4
MAX_LINES = 20_000  # that wait for a viewer; one that is slower than this is dropped
MAX_SECONDS = 15.0  # without a call, after which a viewer is dropped


@dataclass(slots=True)
class _Viewer:
    seen: float  # when it last called
    lines: list[Line] = field(default_factory=list)


def install(loop: EngineLoop) -> None:
    """Let the engine of a loop be watched, by queries between its steps."""
    live = LiveLines(loop.engine)
    loop.handle(StartFollowing, lambda _: live.start())
    loop.handle(GetSteps, lambda query: live.take(query.viewer))
    loop.handle(StopFollowing, lambda query: live.stop(query.viewer))


class LiveLines:
    """The lines of a running engine, for a few viewers at a time. Use it on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._viewers: dict[int, _Viewer] = {}
        self._num_viewers = 0

    def start(self) -> EngineState:
        """Follow the engine from its present state on."""
        now, engine = self._engine.clock.now(), self._engine
        self._drop_silent(now)
        if len(self._viewers) >= MAX_VIEWERS:
            raise ConfigError(
                f"{MAX_VIEWERS} pages already follow this server (limit {MAX_VIEWERS})"
            )
        if not self._viewers:
            engine.observers.append(self._observe)
        self._num_viewers += 1
        self._viewers[self._num_viewers] = _Viewer(now)
        config = engine.scheduler.config
        head = header(config, engine.async_scheduling, is_redacted=True)
        return EngineState(self._num_viewers, head, state_of(engine))

    def take(self, viewer: int) -> StepLines:
        """The lines since the last call.

        ConfigError if the viewer was dropped.
        """
        if viewer not in self._viewers:
            raise ConfigError("the page was too slow and is no longer followed; load it again")
        found = self._viewers[viewer]
        lines, found.lines, found.seen = found.lines, [], self._engine.clock.now()
        return StepLines(lines, not self._engine.has_work)

    def stop(self, viewer: int) -> None:
        """Stop following."""
        self._viewers.pop(viewer, None)
        if not self._viewers and self._observe in self._engine.observers:
            self._engine.observers.remove(self._observe)

    def _observe(self, report: StepReport) -> None:
        line = describe_step(report, has_blocks=True, redact=True)
        for viewer in self._viewers.values():
            viewer.lines.append(line)
        if report.plan.step % 64 == 0:
            self._drop_silent(self._engine.clock.now())

    def _drop_silent(self, now: float) -> None:
        for number, viewer in list(self._viewers.items()):
            if now - viewer.seen > MAX_SECONDS or len(viewer.lines) > MAX_LINES:
                self.stop(number)


def state_of(engine: Engine) -> dict[str, Any]:
    """The requests of an engine between two steps, and the plans whose results are not known."""
    scheduler = engine.scheduler
    new = set(scheduler.state.events.added)  # the next line reports them
    key_of = scheduler.kv.pool.index.key_of
    return {
        "requests": [_described(r) for r in scheduler.requests.values() if r not in new],
        "published": [block for block, key in enumerate(key_of) if key is not None],
        "in_flight": [plan.step for plan in scheduler.in_flight],
    }


def _described(request: Request) -> dict[str, Any]:
    return {
        **describe_request(request, redact=True), "status": request.state.value,
        "computed": request.num_computed, "generated": request.num_generated,
        "cached": request.history.num_cached, "preemptions": request.history.num_preemptions,
        "blocks": list(request.kv.blocks),
        "host": list(request.kv.host.blocks) if request.kv.host else [],
    }  # fmt: skip
