"""Runs a scheduler as a description says, and records it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import (
    ConfigError,
    HeadwayError,
    OwnPolicyError,
    PolicyError,
    ReplayMismatch,
    RequestError,
)
from headway.events import Event, Planned
from headway.executor.simulated import SimulatedExecutor
from headway.lab.recording.format import RecordingWriter, header_record
from headway.lab.recording.metrics import RunMetrics
from headway.lab.recording.spec import Edit, RunSpec, config_of, described, profile_of, requests_of
from headway.lab.simulate import with_profile
from headway.lab.stories import numbers_of
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.record.lines import HeaderLine, Line, PlannedLine
from headway.record.reader import (
    MALFORMED,
    EventReader,
    parse_journal,
    read_journal,
    split_header,
)
from headway.record.replay import Replay, check_replay
from headway.record.stats import RunStats
from headway.record.writer import header
from headway.scheduler import Scheduler
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.text import READY_MADE

MAX_FRAMES = 200_000
MAX_REPLAYED = 10_000  # lines of a recorded run that is decided again before it is shown


class SimulatedRun:
    """One run of a scheduler over a virtual clock; `record` gives its bytes.

    `own` has the `module:function` that may be imported.
    """

    def __init__(self, spec: RunSpec, own: Container[str] = READY_MADE) -> None:
        self._spec, self._own, self._profile = spec, own, profile_of(spec)
        self._space = TokenSpace()
        self._requests = deque(requests_of(spec, self._space))
        self._edits = deque(sorted(spec.edits, key=lambda edit: edit.step))
        self._config = with_profile(config_of(spec, self._profile, own=own), self._profile)
        self._clock = VirtualClock()
        size, host_seconds = self._config.block_size, self._profile.machine.host_seconds
        executor = SimulatedExecutor(
            self._clock, lambda plan: self._profile.step_seconds(plan, size), host_seconds
        )
        self._scheduler = Scheduler(self._config, records_answers=True)
        self._engine = Engine(
            self._scheduler, executor, self._clock, async_scheduling=spec.async_scheduling,
            observers=[self._observe],
        )  # fmt: skip
        self.header = header(
            self._config, spec.async_scheduling, profile=self._profile.name, has_blocks=True
        )
        self._stats = RunStats(self.header)
        self._numbers, self._metrics = numbers_of(spec.story), RunMetrics(self._stats)
        self._writer, self._chunks = RecordingWriter(self.header.config), list[bytes]()
        self._rejected: list[tuple[str, str]] = []

    def record(self, **more: Any) -> Iterator[bytes]:
        """The bytes of the recording, while it is made. A failure is in the end record."""
        yield header_record(self.header, source="simulation", **more)
        error = ""
        try:
            while self._has_more():
                self._step()
                yield from self._take()
                if self._writer.num_frames >= MAX_FRAMES:
                    error = f"the lab shows at most {MAX_FRAMES} steps; this run has more"
                    break
        except HeadwayError as failure:
            error = str(failure)
        summary = summarize(self._stats, len(self._rejected))
        numbers = {label: self._metrics.value(metric) for label, metric in self._numbers.items()}
        yield self._writer.finish(
            summary=summary, rejected=self._rejected, error=error, numbers=numbers
        )

    def _has_more(self) -> bool:
        return bool(self._requests or self._engine.has_work or self._edits_left())

    def _edits_left(self) -> bool:
        return any(edit.add is not None for edit in self._edits)

    def _step(self) -> None:
        """Apply what is due, then take one step or skip idle time."""
        while self._edits and self._edits[0].step <= self._scheduler.num_steps:
            self._apply(self._edits.popleft())
        while self._requests and self._requests[0].arrival <= self._clock.now():
            self._add(self._requests.popleft(), None)
        if self._engine.has_work:
            self._engine.step()
            if self._engine.fault:  # only a user's policy can fail here
                raise ConfigError(f"the run failed: {self._engine.fault}")
        elif self._requests:
            self._clock.advance_to(self._requests[0].arrival)
        elif self._edits:  # the run has ended before their step
            self._apply(self._edits.popleft())

    def _add(self, request: WorkloadRequest, arrival: float | None) -> None:
        try:
            arrival = request.arrival if arrival is None else arrival
            self._engine.add(request.id, request.prompt(), request.params(), arrival)
        except RequestError as error:
            self._rejected.append((request.id, str(error)))
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
            self._scheduler.reconfigure(with_profile(config, self._profile))

    def _observe(self, event: Event) -> None:
        self._stats(event)
        if self._numbers:
            self._metrics.follow(event)
        self._chunks.append(self._writer.follow(event))

    def _take(self) -> list[bytes]:
        chunks, self._chunks = [chunk for chunk in self._chunks if chunk], []
        return chunks


def recording_of_journal(journal: Iterable[HeaderLine | Line], **more: Any) -> Iterator[bytes]:
    """A recording of a journal alone: no block numbers unless the journal has them."""
    head, lines = split_header(journal)
    stats, writer, reader = RunStats(head), RecordingWriter(head.config), EventReader(head)
    yield header_record(head, source="trace", **more)
    error, number, num_plans = "", 1, 0
    try:
        for number, line in enumerate(lines, start=2):
            if isinstance(line, PlannedLine) and line.step != num_plans:
                raise HeadwayError(f"line {number} is step {line.step}, not {num_plans}")
            event = reader.event(line)
            num_plans += isinstance(event, Planned) and not event.plan.is_empty
            stats(event)
            yield writer.follow(event)
            if writer.num_frames >= MAX_FRAMES:
                raise HeadwayError(f"line {number}: the lab shows at most {MAX_FRAMES} steps")
    except HeadwayError as failure:
        error = f"{failure}; the steps before it are shown"
    except MALFORMED as failure:
        error = (
            f"line {number} does not continue the run "
            f"({type(failure).__name__}: {failure}); the steps before it are shown"
        )
    yield writer.finish(summary=summarize(stats), rejected=[], error=error)


def recording_of_replay(
    journal: Iterable[HeaderLine | Line], own: Container[str] = READY_MADE, **more: Any
) -> Iterator[bytes]:
    """A recording of a recorded run that the scheduler decides again: with blocks and alternatives."""
    head, lines = split_header(journal)
    reader = EventReader(head)
    events = [reader.event(line) for line in lines]
    replay = Replay(read_preset(head.config, own=own), own, records_answers=True)
    stats, writer = RunStats(head), RecordingWriter(head.config)
    yield header_record(replace(head, has_blocks=True), source="replay", **more)
    error = ""
    try:
        for recorded in events:
            event = replay.repeat(recorded)
            stats(event)
            yield writer.follow(event)
    except (ReplayMismatch, PolicyError) as failure:
        error = str(failure)
    yield writer.finish(summary=summarize(stats), rejected=[], error=error)


def recording_of_file(path: Path, own: Container[str] = READY_MADE) -> Iterator[bytes]:
    """A recording of a trace file; FormatError if it is not one. `own` as for `SimulatedRun`."""
    head = next(read_journal(path))  # errors in the header are raised here
    with path.open("rb") as file:
        num_lines = sum(1 for _ in islice(file, MAX_REPLAYED + 2)) - 1
    return _recording_of_recorded(head, lambda: read_journal(path), num_lines, own)


def recording_of_texts(
    name: str, texts: list[bytes], own: Container[str] = READY_MADE
) -> Iterator[bytes]:
    """A recording of the lines of a trace; FormatError, with this name, if they are not one."""
    head = next(parse_journal(name, texts))
    return _recording_of_recorded(head, lambda: parse_journal(name, texts), len(texts) - 1, own)


def _recording_of_recorded(
    head: HeaderLine | Line,
    read: Callable[[], Iterator[HeaderLine | Line]],
    num_lines: int,
    own: Container[str],
) -> Iterator[bytes]:
    """A recording of a recorded run. `read` gives its header and lines, each time anew.

    A short run is decided again, which shows blocks and alternatives. A long run, a redacted one,
    and one that cannot be repeated are shown from their lines. If only a permission is missing, the
    recording's header has the names of the policies in `own`.
    """
    assert isinstance(head, HeaderLine), "the first line is the header"
    more: dict[str, Any] = {"notice": "", "own": ()}
    if num_lines <= MAX_REPLAYED and not head.is_redacted:
        try:
            lines = list(read())
            check_replay(lines, own)
            yield from recording_of_replay(lines, own)
            return
        except OwnPolicyError as error:
            more = {"notice": str(error), "own": error.names}
        except (HeadwayError, *MALFORMED) as error:
            more["notice"] = str(error)
    yield from recording_of_journal(read(), **more)
