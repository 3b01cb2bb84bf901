"""Feed a recorded run back: the same requests, the same step times, the same decisions.

The scheduler decides anew; only times and sampled tokens come from the trace. If the decision logs
agree, the simulator's scheduling error is exactly zero. Works for any recorded run, real or not, that
was recorded to its end and in which no step failed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import ReplayMismatch
from headway.executor.simulated import SimulatedHandle
from headway.lab.diff import choices
from headway.observe.trace import Line, decisions, describe_step, request_of, unruns
from headway.plan import Column, Plan, StepResult
from headway.request import Request
from headway.scheduler import Scheduler, preset

Outputs = dict[Request, list[int]]


class RecordedExecutor:
    """Takes as long as the recorded step took, and samples what was sampled then."""

    def __init__(self, clock: VirtualClock, steps: Iterable[Line], outputs: Outputs) -> None:
        self._clock = clock
        self._times = deque((line["start"], line["end"]) for line in steps if line["step"] >= 0)
        self._outputs = outputs
        self._num_sampled: dict[Request, int] = {}

    def launch(self, plan: Plan) -> SimulatedHandle:
        if not self._times:
            raise ReplayMismatch(f"the recorded run ends before step {plan.step}")
        started, ended = self._times.popleft()
        for chunk in plan.chunks:
            self._num_sampled[chunk.request] = chunk.end - chunk.request.num_prompt
        num_columns = plan.num_steps if plan.decodes else 0
        columns: list[Column] = [
            [self._next(request) for request in plan.decodes] for _ in range(num_columns)
        ]
        firsts = [self._next(c.request) for c in plan.chunks if c.is_last]
        return SimulatedHandle(self._clock, StepResult(columns, firsts, started, ended))

    def _next(self, request: Request) -> int:
        """The recorded token; past the record's end anything will do, it is dropped."""
        place = self._num_sampled[request]
        self._num_sampled[request] = place + 1
        output = self._outputs[request]
        return output[place] if place < len(output) else -1


def replay(trace: Iterable[Line]) -> Iterator[Line]:
    """The steps that the scheduler takes when it lives through the recorded run again."""
    header, *steps = trace
    ends = defaultdict[str, deque[Line]](deque)  # of everybody who had an id: it may come back
    for end in (end for line in steps for end in line.get("finished", ())):
        ends[end["id"]].append(end)
    outputs: Outputs = {}
    reasons: dict[str, str] = {}  # of those who are ended from outside: abort, stop
    clock, lines = VirtualClock(), deque[Line]()
    scheduler = Scheduler(preset(**header["config"]))
    executor = RecordedExecutor(clock, steps, outputs)
    engine = Engine(scheduler, executor, clock, async_scheduling=header["async_scheduling"])
    engine.observers.append(lambda report: lines.append(describe_step(report)))
    known: dict[str, Request] = {}

    interrupts: list[tuple[str, int]] = []  # came while the plan of the line before was in flight

    def tell(added: list[Line], aborted: list[tuple[str, int]], num_told: int) -> None:
        """Requests that come and go, in the order they did."""
        for number, asked in enumerate([*added, None], start=num_told):
            for id in [id for id, after in aborted if max(after, num_told) == number]:
                scheduler.abort(id, reasons.get(id, "abort"))
            if asked is not None:
                request = known[asked["id"]] = request_of(asked, known)
                end = ends[request.id].popleft() if ends[request.id] else None
                outputs[request] = list(unruns(end["output"])) if end else []
                reasons[request.id] = end["reason"] if end else "abort"
                scheduler.add(request)

    for line in steps:
        _refuse_faults(line)
        added, aborted = line.get("added", []), line.get("aborted", [])
        is_drained = engine.num_in_flight > line.get("in_flight", 0)
        num_added, num_aborted = line.get("early", (0, 0))
        if not is_drained:
            num_added, num_aborted = len(added), len(aborted)
        tell(added[:num_added], interrupts + aborted[:num_aborted], 0)
        if is_drained:
            engine.step()
        clock.advance_to(line["t"])
        tell(added[num_added:], aborted[num_aborted:], num_added)
        engine.step()
        interrupts = line.get("interrupted", [])
        yield from lines
        lines.clear()
    tell([], interrupts, 0)
    while engine.has_work:
        engine.step()
        yield from lines
        lines.clear()


def _refuse_faults(line: Line) -> None:
    """A fault is no decision: it cannot be decided again."""
    if any(end["reason"] == "error" for end in line.get("finished", ())):
        raise ReplayMismatch("a step of the recorded run failed; only runs without faults replay")


def _sentence(recorded: Line | None, again: Line | None) -> str:
    if recorded is None or again is None:
        step, longer = (again or recorded or {})["step"], "replay" if recorded is None else "record"
        return f"only the {longer} has a step {step}"
    parting = "; ".join(choices(recorded, again, ("the record", "the replay")))
    return f"step {recorded['step']}: {parting}"


def check_replay(trace: Iterable[Line]) -> int:
    """Replay and compare; the number of equal steps, or ReplayMismatch with the first that differs."""
    lines = list(trace)
    num_equal = 0
    for recorded, again in zip_longest(lines[1:], replay(lines)):
        if recorded is None or again is None or decisions(recorded) != decisions(again):
            raise ReplayMismatch(_sentence(recorded, again))
        num_equal += 1
    return num_equal
