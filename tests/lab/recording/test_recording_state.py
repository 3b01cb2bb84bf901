"""A recording shows the state of the scheduler: after every plan, in every scenario, by seek and by play."""

from __future__ import annotations

import random
from functools import cache
from math import inf
from typing import Any

import pytest

from headway.events import Completed, Planned
from headway.lab.recording.format import RecordingWriter, header_record
from headway.lab.recording.live import LiveRecordings
from headway.lab.recording.reader import RunRecording
from headway.lab.recording.state import RecordedState, split
from headway.record.reader import events_of, split_header
from headway.request import Request
from tests.scheduler import decisions
from tests.support.journals import Recorder
from tests.support.recorded_states import note_states, shown


class Recorded:
    """A run with its journal, and the state of the scheduler after each of its plans."""

    def __init__(self, seed: int, **changes: Any) -> None:
        engine = self.engine = decisions.engine_of(seed, **changes)
        self.states = note_states(engine.scheduler)
        record = Recorder(engine.scheduler.config, engine.async_scheduling, has_blocks=True)
        engine.observers.append(record)
        self.run(seed)
        self.journal = record.lines.read()
        self.header, _ = split_header(self.journal)
        self.plans = [e for e in record.events if isinstance(e, Planned)]

    def run(self, seed: int) -> None:
        decisions.run(self.engine, seed)


class Watched(Recorded):
    """A run that is recorded from the end of a step on, or from the next arrival after it.

    The recording is taken after some steps, so its chunks have one frame or several.
    """

    def __init__(self, seed: int, after: int, is_at_arrival: bool) -> None:
        self.after, self.is_at_arrival = after, is_at_arrival
        self.recording, self.data = RunRecording(), b""
        self.first, self.in_flight = inf, set[int]()  # the first step that is recorded
        super().__init__(seed)

    def run(self, seed: int) -> None:
        engine, step, known = self.engine, self.engine.step, set[Request]()
        live, scheduler, viewer = LiveRecordings(engine), engine.scheduler, 0
        rng = random.Random(seed)

        def start() -> None:
            nonlocal viewer
            self.first = scheduler.num_steps
            self.in_flight = {planned.plan.step for planned in scheduler.in_flight}
            viewer, self.data = (found := live.start()).viewer, found.header

        def stepping() -> Completed | None:
            nonlocal known
            is_due = not viewer and scheduler.num_steps >= self.after
            if is_due and (not self.is_at_arrival or set(scheduler.requests.values()) - known):
                start()
            completed = step()
            known = set(scheduler.requests.values())
            if viewer and rng.random() < 0.2:
                take()
            return completed

        def take() -> None:
            self.data += live.take(viewer)
            self.data = self.data[self.recording.read(self.data) :]

        engine.step = stepping  # type: ignore[method-assign]
        decisions.run(engine, seed)
        if viewer:
            take()
        live.stop(viewer)
        assert not engine.observers[1:]


@cache
def recorded(seed: int) -> Recorded:
    """A run to its end, for tests that only read it."""
    return Recorded(seed)


def recording_of(run: Recorded) -> RunRecording:
    """The recording of a run, written and read again in pieces."""
    writer, recording = RecordingWriter(run.header.config), RunRecording()
    data = header_record(run.header)
    for event in events_of(run.journal):
        data += writer.follow(event)
        data = data[recording.read(data) :]
    data += writer.finish(steps=len(run.plans))
    assert recording.read(data) == len(data) and recording.end == {"steps": len(run.plans)}
    return recording


@pytest.mark.parametrize("seed", range(0, decisions.NUM_RUNS, 47))
def test_a_recording_shows_the_state_of_the_scheduler_after_every_plan(seed: int) -> None:
    """By playing from start to end, and by seeking any frame."""
    check_recording(recorded(seed), seed)


def check_recording(run: Recorded, seed: int) -> None:
    recording = recording_of(run)
    ids = [request[0] for request in recording.requests]
    num_running = {e.plan.step: e.num_running for e in run.plans if not e.plan.is_empty}
    played = RecordedState(run.engine.scheduler.config.block_size)
    rng = random.Random(seed)
    for frame in range(recording.num_frames):
        for op, args in split(recording.ops(frame)):
            played.apply(op, args)
        step = recording.column("step", frame)
        if step >= 0:
            assert shown(played, ids) == run.states[step], f"step {step}"
            assert recording.column("running", frame) == num_running[step]
        if rng.random() < 0.1:
            assert shown(recording.state(frame), ids) == shown(played, ids), f"frame {frame}"
    assert not played.requests and not played.refs
    assert played.num_finished == len(recording.requests)


@pytest.mark.parametrize("is_at_arrival", [False, True])
@pytest.mark.parametrize("seed", range(2, decisions.NUM_RUNS, 41))
def test_a_recording_that_starts_in_the_middle_shows_the_same_states(
    seed: int, is_at_arrival: bool
) -> None:
    steps = (1, 5) if is_at_arrival else (2, 40)  # in some runs the last request arrives early
    run = Watched(seed, random.Random(seed).randrange(*steps), is_at_arrival)
    assert run.first < inf, "nothing was recorded"
    recording, ids = run.recording, [request[0] for request in run.recording.requests]
    shown_steps = set[int]()
    for frame in range(recording.num_frames):
        step = recording.column("step", frame)
        if step >= 0:
            assert shown(recording.state(frame), ids) == run.states[step], f"step {step}"
            shown_steps.add(step)
    assert shown_steps == {s for s in run.states if s >= run.first and s not in run.in_flight}


def test_a_recording_of_an_idle_engine_has_no_requests_and_goes_on_later() -> None:
    run = recorded(0)
    writer, recording = RecordingWriter(run.header.config), RunRecording()
    recording.read(header_record(run.header))
    *_, last = events = list(events_of(run.journal))
    for event in events:
        recording.read(writer.follow(event))
    recording.read(writer.flush())
    writer.settle()
    writer.settle()  # has nothing to add
    recording.read(writer.flush())
    frame = recording.num_frames - 1
    assert frame == len(run.states) and recording.column("step", frame) == -1
    assert not recording.state(frame).requests
    assert recording.chunks[-1].times[-1].tolist() == [last.time] * 3
    for event in events_of(run.journal):
        recording.read(writer.follow(event))
        if isinstance(event, Completed):
            break
    recording.read(writer.flush())
    assert recording.state(frame + 1).requests
