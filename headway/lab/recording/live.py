"""Records a running engine for the pages that follow it: its present state, then every step.

The engine makes a recording only while a page is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.queries import GetRecording, LiveRecording, StartRecording, StopRecording
from headway.errors import ConfigError
from headway.events import Event
from headway.lab.recording.format import RecordingWriter, header_record
from headway.record.writer import header

MAX_VIEWERS = 4
MAX_BYTES = 32 << 20  # that wait for a viewer; one that is slower than this is dropped
MAX_SECONDS = 15.0  # without a call, after which a viewer is dropped


@dataclass(slots=True)
class _Viewer:
    seen: float  # when it last called
    writer: RecordingWriter
    chunks: bytearray = field(default_factory=bytearray)


def install(loop: EngineLoop) -> None:
    """Let the engine of a loop be watched, by queries between its steps."""
    live = LiveRecordings(loop.engine)
    loop.handle(StartRecording, lambda _: live.start())
    loop.handle(GetRecording, lambda query: live.take(query.viewer))
    loop.handle(StopRecording, lambda query: live.stop(query.viewer))


class LiveRecordings:
    """Recordings of a running engine, for a few viewers at a time. Use it on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._viewers: dict[int, _Viewer] = {}
        self._num_viewers = 0

    def start(self) -> LiveRecording:
        """Start a recording with the engine's present state."""
        engine, now = self._engine, self._engine.clock.now()
        self._drop_silent(now)
        if len(self._viewers) >= MAX_VIEWERS:
            raise ConfigError(
                f"{MAX_VIEWERS} pages already follow this server (limit {MAX_VIEWERS})"
            )
        engine.tell()  # the state that the recording begins with has these events
        if not self._viewers:
            engine.observers.append(self._observe)
        config, is_async = engine.scheduler.config, engine.async_scheduling
        head = header(config, is_async, is_redacted=True, has_blocks=True)
        viewer = _Viewer(now, RecordingWriter(head.config))
        viewer.writer.load(engine.scheduler)
        self._num_viewers += 1
        self._viewers[self._num_viewers] = viewer
        return LiveRecording(self._num_viewers, header_record(head, source="live"))

    def take(self, number: int) -> bytes:
        """The recording since the last call. ConfigError if the viewer was dropped."""
        if (viewer := self._viewers.get(number)) is None:
            raise ConfigError("the page was too slow and is no longer followed; load it again")
        viewer.seen = self._engine.clock.now()
        if not self._engine.has_work:
            viewer.writer.settle()
        data = bytes(viewer.chunks) + viewer.writer.flush()
        viewer.chunks.clear()
        return data

    def stop(self, number: int) -> None:
        """Stop following."""
        self._viewers.pop(number, None)
        if not self._viewers and self._observe in self._engine.observers:  # else it has failed
            self._engine.observers.remove(self._observe)

    def _observe(self, event: Event) -> None:
        for viewer in self._viewers.values():
            viewer.chunks += viewer.writer.follow(event)
        self._drop_silent(event.time)

    def _drop_silent(self, now: float) -> None:
        for number, viewer in list(self._viewers.items()):
            if now - viewer.seen > MAX_SECONDS or len(viewer.chunks) > MAX_BYTES:
                self.stop(number)
