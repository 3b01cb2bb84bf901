"""What a recording shows is what the scheduler knew: by seek, by play, and by replay.

For every preset, with and without async scheduling: random seeks. The world is small, and it
has everything that changes a state: swaps, aborts, samples of one prompt, several decode steps in a
plan, deferred decodes, resets of the prefix cache, and steps that fail.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    Reset,
    ended_by,
    preempted_by,
)
from headway.executor.simulated import Script, SimulatedExecutor, SimulatedHandle
from headway.lab.recording.reader import RunRecording
from headway.lab.recording.run import recording_of_journal, recording_of_replay
from headway.lab.recording.state import RecordedState, split
from headway.plan import Plan
from headway.request import RequestParams
from headway.scheduler import PRESETS, Scheduler, preset
from tests.support.journals import Recorder
from tests.support.recorded_states import State, note_states, shown, state_of

NUM_SEEKS, NUM_REQUESTS, END = 25, 26, 0
SIZES: dict[str, Any] = {
    "block_size": 4, "num_blocks": 30, "num_host_blocks": 60, "max_num_seqs": 12,
    "max_num_batched_tokens": 70, "num_scheduler_steps": 2, "max_model_len": 80,
}  # fmt: skip
each_preset = pytest.mark.parametrize("name", PRESETS)
each_depth = pytest.mark.parametrize("is_async", [False, True])


class Faulty(SimulatedExecutor):
    """Fails now and then: when a plan is launched, or when its result is due."""

    def __init__(self, clock: VirtualClock, failing: set[int]) -> None:
        super().__init__(clock, lambda plan: 0.01 + 1e-4 * plan.num_tokens, 1e-4)
        self._failing = failing

    def launch(self, plan: Plan) -> SimulatedHandle:
        if plan.step in self._failing and plan.step % 2:
            raise RuntimeError("the launch failed")
        handle = super().launch(plan)
        return Failing(handle.clock, handle.result) if plan.step in self._failing else handle


class Failing(SimulatedHandle):
    def wait(self) -> Any:
        raise RuntimeError("the step failed")


class World:
    """A run: its journal, and the state of the scheduler after each of its plans."""

    def __init__(self, name: str, is_async: bool, failing: frozenset[int]) -> None:
        changes = {"swap": "swap"} if name in ("headway", "vllm", "vllm_v1") else {}
        if name in ("nano_vllm", "deep_dive"):
            changes = {"swap": "discard_output"}
        budget = {"max_num_batched_tokens": 4} if name in ("nano_vllm", "deep_dive") else {}
        self._clock = clock = VirtualClock()
        scheduler = Scheduler(preset(name, **{**SIZES, **changes, **budget}))
        self.states = note_states(scheduler)
        record = Recorder(scheduler.config, is_async, has_blocks=True)
        self.engine = Engine(
            scheduler, Faulty(clock, set(failing)), clock, async_scheduling=is_async,
            observers=[record, self._observe],
        )  # fmt: skip
        self.between: list[State] = []  # after each failure, and at the end
        self.num_swapped_at_failures = 0
        fail = scheduler.fail

        def counting(reason: str) -> None:
            self.num_swapped_at_failures += len(scheduler.swapped)
            fail(reason)

        scheduler.fail = counting  # type: ignore[method-assign]
        self._rng = random.Random(f"{name} {is_async}")
        self._run()
        self.between.append(state_of(scheduler))
        self.events, self.journal = record.events, record.lines.read()

    def _observe(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.between.append(state_of(self.engine.scheduler))

    def _run(self) -> None:
        prefix, rng, engine = self._tokens(12), self._rng, self.engine
        for number in range(NUM_REQUESTS):
            self._add(str(number), prefix)
            for _ in range(rng.choice((0, 1, 4))):
                if engine.has_work:
                    engine.step()
            if rng.random() < 0.3:
                engine.abort(str(rng.randrange(number + 1)))
            if number % 9 == 8:
                engine.run()  # until it is idle, where the cache can be reset
                assert engine.scheduler.reset_cache()
        engine.run()

    def _tokens(self, length: int) -> list[int]:
        return [self._rng.randrange(1, 50_000) for _ in range(length)]

    def _add(self, id: str, prefix: list[int]) -> None:
        rng = self._rng
        prompt = rng.choice((prefix, [])) + self._tokens(rng.randrange(1, 16))
        num_output = rng.randrange(1, 34)
        params = RequestParams(
            max_tokens=rng.choice((num_output, 34)), n=rng.choice((1, 1, 3)),
            priority=rng.randrange(3), eos_ids=frozenset({END}),
            sampling=Script(num_output, 60_000 + int(id), END),
        )  # fmt: skip
        self.engine.add(id, prompt, params)


@cache
def world_of(name: str, is_async: bool, *failing: int) -> World:
    return World(name, is_async, frozenset(failing))


def recording_of(data: bytes) -> RunRecording:
    recording = RunRecording()
    assert recording.read(data) == len(data) and recording.end and not recording.end["error"]
    return recording


def check(recording: RunRecording, world: World) -> None:
    """State by play = the scheduler's; state by random seeks = state by play; columns = state."""
    ids = [request[0] for request in recording.requests]
    played, by_play = RecordedState(SIZES["block_size"]), list[State]()
    between = iter(world.between)
    for frame in range(recording.num_frames):
        for op, args in split(recording.ops(frame)):
            played.apply(op, args)
        by_play.append(copied(shown(played, ids)))
        step = recording.column("step", frame)
        if step >= 0:
            assert by_play[-1] == world.states[step], f"step {step}"
        else:
            assert holdings(by_play[-1]) == holdings(next(between)), f"frame {frame}"
        assert recording.column("free", frame) == SIZES["num_blocks"] - len(played.refs), (
            f"step {step}"
        )
        assert recording.column("swapped", frame) == played.num_swapped
    num_ended = sum(recording.column("finished", frame) for frame in range(recording.num_frames))
    assert num_ended == played.num_finished == len(recording.requests)
    num_preempted = sum(
        recording.column("preempted", frame) for frame in range(recording.num_frames)
    )
    assert num_preempted == sum(len(preempted_by(event)) for event in world.events)
    assert not played.requests and not played.refs and len(list(between)) <= 1
    rng = random.Random(recording.num_frames)
    for _ in range(NUM_SEEKS):
        frame = rng.randrange(recording.num_frames)
        assert shown(recording.state(frame), ids) == by_play[frame], f"frame {frame}"


def holdings(state: State) -> State:
    """A state without the reasons to wait, which belong to a plan."""
    requests = {id: (*each[:5], each[6]) for id, each in state["requests"].items()}
    return {**state, "requests": requests, "rest": None}


def copied(state: State) -> State:
    """A copy that later operations do not change."""
    requests = {id: (*each[:3], list(each[3]), list(each[4]), *each[5:])
                for id, each in state["requests"].items()}  # fmt: skip
    return {**state, "requests": requests, "held": dict(state["held"])}


@each_depth
@each_preset
@pytest.mark.parametrize("failing", [(), (7, 20, 30, 41, 60)], ids=["", "failed steps"])
def test_a_recording_shows_what_the_scheduler_knew(
    name: str, is_async: bool, failing: tuple[int, ...]
) -> None:
    world = world_of(name, is_async, *failing)
    recording = recording_of(b"".join(recording_of_journal(world.journal)))
    check(recording, world)
    replayed = recording_of(b"".join(recording_of_replay(world.journal)))
    assert replayed.num_frames == recording.num_frames
    for frame in range(recording.num_frames):
        assert replayed.ops(frame) == recording.ops(frame), f"frame {frame}"
        for column in recording.header["columns"]:
            assert replayed.column(column, frame) == recording.column(column, frame), column


def test_the_worlds_have_everything_that_changes_a_state() -> None:
    seen: Counter[str] = Counter()
    for name in PRESETS:
        for is_async in (False, True):
            for world in (world_of(name, is_async), world_of(name, is_async, 7, 20, 30, 41, 60)):
                count(world.events, seen)
                seen["swapped at a failure"] += world.num_swapped_at_failures
    rare = {
        "swap 0", "swap 1", "recompute 0", "recompute 1", "discard 0", "discard 1", "copied out",
        "copied in", "aborted 0", "aborted 1", "samples", "several steps", "deferred", "error",
        "stop", "length", "reset", "planned 1", "dropped", "swapped at a failure",
    }  # fmt: skip
    assert not {each for each in rare if seen[each] < 5}, seen


def count(events: list[Event], seen: Counter[str]) -> None:
    """What happens in a run; with 1 if a plan was in flight then, else with 0."""
    num_in_flight = 0
    for event in events:
        is_in_flight = num_in_flight > 0
        for each in preempted_by(event):
            kind = "swap" if each.is_swap else "discard" if each.is_discard else "recompute"
            seen[f"{kind} {is_in_flight:d}"] += 1
        seen.update(request.finish_reason or "" for request in ended_by(event))
        match event:
            case Planned(plan):
                seen[f"planned {is_in_flight:d}"] += 1
                seen["several steps"] += plan.num_steps > 1
                seen["deferred"] += bool(plan.deferred)
                seen["copied out"] += bool(plan.copies_out)
                seen["copied in"] += bool(plan.copies_in)
                num_in_flight += not plan.is_empty
            case Completed(Planned(plan)):
                seen["dropped"] += any(plan.dropped)
                num_in_flight -= 1
            case Added(requests):
                seen["samples"] += sum(request.parent is not None for request in requests)
            case Aborted():
                seen[f"aborted {is_in_flight:d}"] += 1
            case Reset():
                seen["reset"] += 1
            case Failed():
                num_in_flight = 0
