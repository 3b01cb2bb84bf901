"""Runs a scheduler as a description says, or repeats a recorded run, and records it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import ConfigError, HeadwayError, OwnPolicyError, PolicyError, RequestError
from headway.events import Event, Planned
from headway.executor.simulated import SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.recording.format import RecordingWriter, header_record
from headway.lab.recording.metrics import RunMetrics
from headway.lab.recording.spec import Edit, RunSpec, config_of, described, requests_of
from headway.lab.simulate import as_simulated
from headway.lab.stories import numbers_of
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.record.lines import CompletedLine, HeaderLine, Line, PlannedLine
from headway.record.reader import MALFORMED, EventReader, parse_journal, read_journal, split_header
from headway.record.replay import Replay, check_replay
from headway.record.stats import RunStats
from headway.record.writer import header
from headway.scheduler import Scheduler
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.text import READY_MADE

MAX_FRAMES = 200_000
MAX_REPLAYED = 10_000  # steps of a recorded run that is decided again before it is shown


class Recorder:
    """Follows a run: its recording, its summary, and metrics by label if a story wants some."""

    def __init__(self, head: HeaderLine, numbers: Mapping[str, str] | None = None) -> None:
        self._head, self._stats, self._numbers = head, RunStats(head), numbers
        self._metrics = RunMetrics(self._stats)
        self.writer = RecordingWriter(head.config)
        self.rejected: list[tuple[str, str]] = []

    def follow(self, event: Event) -> bytes:
        """The bytes of a chunk that has become full, or nothing."""
        self._stats(event)
        if self._numbers:
            self._metrics.follow(event)
        return self.writer.follow(event)

    def record(self, chunks: Iterable[bytes], **more: Any) -> Iterator[bytes]:
        """The bytes of a recording, while its chunks are made. A failure is in the end record."""
        yield header_record(self._head, **more)
        error = ""
        try:
            yield from chunks
        except HeadwayError as failure:
            error = str(failure)
        summary = summarize(self._stats, len(self.rejected))
        end: dict[str, object] = {"summary": summary, "rejected": self.rejected, "error": error}
        if self._numbers is not None:
            values = {label: self._metrics.value(name) for label, name in self._numbers.items()}
            end["numbers"] = values
        yield self.writer.finish(**end)


class SimulatedRun:
    """One run of a scheduler over a virtual clock; `record` gives its bytes.

    `own` has the `module:function` that may be imported.
    """

    def __init__(self, spec: RunSpec, own: Container[str] = READY_MADE) -> None:
        self._spec, self._own, self._space = spec, own, TokenSpace()
        profile = self._profile = load_profile(spec.profile)
        self._requests = deque(requests_of(spec, self._space))
        self._edits = deque(sorted(spec.edits, key=lambda edit: edit.step))
        config = as_simulated(config_of(spec, profile, own=own), profile)
        self._clock, size = VirtualClock(), config.block_size
        executor = SimulatedExecutor(
            self._clock, lambda plan: profile.step_seconds(plan, size), profile.machine.host_seconds
        )
        self._scheduler = Scheduler(config, records_answers=True)
        self._engine = Engine(
            self._scheduler, executor, self._clock, async_scheduling=spec.async_scheduling,
            observers=[lambda event: self._chunks.append(self._recorder.follow(event))],
        )  # fmt: skip
        self.header = header(config, spec.async_scheduling, profile=profile.name, has_blocks=True)
        self._recorder = Recorder(self.header, numbers_of(spec.story))
        self._chunks: list[bytes] = []

    def record(self, **more: Any) -> Iterator[bytes]:
        """The bytes of the recording, while it is made. A failure is in the end record."""
        return self._recorder.record(self._run(), source="simulation", **more)

    def _run(self) -> Iterator[bytes]:
        engine, edits = self._engine, self._edits
        while self._requests or engine.has_work or any(edit.add is not None for edit in edits):
            self._step()
            yield from filter(None, self._chunks)
            self._chunks.clear()
            if self._recorder.writer.num_frames >= MAX_FRAMES:
                raise HeadwayError(f"the lab shows at most {MAX_FRAMES} steps; this run has more")

    def _step(self) -> None:
        """Apply what is due, then take one step or skip idle time."""
        while self._edits and self._edits[0].step <= self._scheduler.num_steps:
            self._apply(self._edits.popleft())
        while self._requests and self._requests[0].arrival <= self._clock.now():
            request = self._requests.popleft()
            self._add(request, request.arrival)
        if self._engine.has_work:
            self._engine.step()
            if self._engine.fault:  # only a user's policy can fail here
                raise ConfigError(f"the run failed: {self._engine.fault}")
        elif self._requests:
            self._clock.advance_to(self._requests[0].arrival)
        elif self._edits:  # the run has ended before their step
            self._apply(self._edits.popleft())

    def _add(self, request: WorkloadRequest, arrival: float) -> None:
        try:
            self._engine.add(request.id, request.prompt(), request.params(), arrival)
        except RequestError as error:
            self._recorder.rejected.append((request.id, str(error)))
        except PolicyError as error:
            raise ConfigError(str(error)) from None

    def _apply(self, edit: Edit) -> None:
        if edit.add is not None:
            request = described(edit.add, self._space, f"added at {edit.step}")
            self._add(request, self._clock.now())
        elif edit.abort is not None:
            self._engine.abort(edit.abort)
        else:
            config = config_of(self._spec, self._profile, edit.set, self._own)
            self._scheduler.reconfigure(as_simulated(config, self._profile))


def recording_of_journal(journal: Iterable[HeaderLine | Line], **more: Any) -> Iterator[bytes]:
    """A recording of a journal alone: no block numbers unless the journal has them."""
    head, lines = split_header(journal)
    recorder = Recorder(head)
    return recorder.record(_follow_lines(recorder, head, lines), source="trace", **more)


def _follow_lines(recorder: Recorder, head: HeaderLine, lines: Iterable[Line]) -> Iterator[bytes]:
    """The chunks of a recording; HeadwayError names the first line that cannot be shown."""
    reader, number, num_plans = EventReader(head), 1, 0
    try:
        for number, line in enumerate(lines, start=2):
            if isinstance(line, PlannedLine) and line.step != num_plans:
                raise HeadwayError(f"line {number} is step {line.step}, not {num_plans}")
            event = reader.event(line)
            num_plans += isinstance(event, Planned) and not event.plan.is_empty
            if chunk := recorder.follow(event):
                yield chunk
            if recorder.writer.num_frames >= MAX_FRAMES:
                raise HeadwayError(f"line {number}: the lab shows at most {MAX_FRAMES} steps")
    except HeadwayError as failure:
        raise HeadwayError(f"{failure}; the steps before it are shown") from None
    except MALFORMED as failure:
        raise HeadwayError(
            f"line {number} does not continue the run "
            f"({type(failure).__name__}: {failure}); the steps before it are shown"
        ) from None


def recording_of_replay(
    journal: Iterable[HeaderLine | Line], own: Container[str] = READY_MADE
) -> Iterator[bytes]:
    """A recording of a run that the scheduler decides again: with blocks and alternatives."""
    head, lines = split_header(journal)
    events = list(map(EventReader(head).event, lines))
    replay = Replay(read_preset(head.config, own=own), own, records_answers=True)
    recorder = Recorder(replace(head, has_blocks=True))
    chunks = (recorder.follow(replay.repeat(event)) for event in events)
    return recorder.record(chunks, source="replay")


def recording_of_file(path: Path, own: Container[str] = READY_MADE) -> Iterator[bytes]:
    """A recording of a trace file; FormatError if it is not one. `own` as for `SimulatedRun`."""
    head = next(read_journal(path))  # errors in the header are raised here
    return _recording_of_trace(head, lambda: read_journal(path), own)


def recording_of_texts(
    name: str, texts: list[bytes], own: Container[str] = READY_MADE
) -> Iterator[bytes]:
    """A recording of the lines of a trace; FormatError, with this name, if they are not one."""
    head = next(parse_journal(name, texts))
    return _recording_of_trace(head, lambda: parse_journal(name, texts), own)


def _recording_of_trace(
    head: HeaderLine | Line,
    read: Callable[[], Iterator[HeaderLine | Line]],
    own: Container[str],
) -> Iterator[bytes]:
    """A recording of a recorded run. `read` gives its header and lines, each time anew.

    A short run is decided again, which shows blocks and alternatives. A long run, a redacted one,
    and one that cannot be repeated are shown from their lines. If only a permission is missing, the
    recording's header has the names of the policies in `own`.
    """
    assert isinstance(head, HeaderLine), "the first line is the header"
    notice, names = "", tuple[str, ...]()
    if not head.is_redacted:
        try:
            if lines := _short_journal(read()):
                check_replay(lines, own)
                yield from recording_of_replay(lines, own)
                return
        except OwnPolicyError as error:
            notice, names = str(error), error.names
        except (HeadwayError, *MALFORMED) as error:
            notice = str(error)
    yield from recording_of_journal(read(), notice=notice, own=names)


def _short_journal(journal: Iterator[HeaderLine | Line]) -> list[HeaderLine | Line] | None:
    """The lines of a journal; None if it has more than MAX_REPLAYED steps."""
    lines, num_steps = list[HeaderLine | Line](), 0
    for line in journal:
        num_steps += isinstance(line, CompletedLine)
        if num_steps > MAX_REPLAYED:
            return None
        lines.append(line)
    return lines
