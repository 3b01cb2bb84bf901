"""Replay a recorded run: the same requests and step times must give the same decisions.

Times and sampled tokens come from the trace; the scheduler decides everything again. If all
decisions agree, the scheduling error of the simulator is exactly zero. Any real or simulated run
can be replayed if it was recorded to its end and no step failed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import zip_longest

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import ConfigError, ReplayMismatch
from headway.executor.simulated import SimulatedHandle
from headway.lab.diff import differences
from headway.observe.trace import Line, decisions, describe_step, request_of
from headway.plan import Column, Plan, StepResult
from headway.record.packing import unpack_tokens
from headway.request import Request
from headway.scheduler import Scheduler
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.text import READY_MADE

Outputs = dict[Request, list[int]]


class RecordedExecutor:
    """Returns the recorded step times and the recorded tokens."""

    def __init__(self, clock: VirtualClock, steps: Iterable[Line], outputs: Outputs) -> None:
        self._clock = clock
        self._times = deque((line["start"], line["end"]) for line in steps if line["step"] >= 0)
        self._outputs = outputs
        self._num_sampled: dict[Request, int] = {}
        self.is_forked = False  # see film/fork.py

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
        first_tokens = [self._next(c.request) for c in plan.chunks if c.is_last]
        return SimulatedHandle(self._clock, StepResult(columns, first_tokens, started, ended))

    def _next(self, request: Request) -> int:
        """The next recorded token, or -1 after the recorded end, where no token is kept."""
        place = self._num_sampled[request]
        self._num_sampled[request] = place + 1
        output = self._outputs[request]
        return output[place] if place < len(output) else -1


def replay(trace: Iterable[Line], own: Container[str] = READY_MADE) -> Iterator[Line]:
    """The steps of the scheduler when it decides the recorded run again.

    ConfigError if the trace is redacted, or names a `module:function` that is not in `own`.
    """
    header, *steps = trace
    if header.get("is_redacted"):
        raise ConfigError(
            "the trace was recorded with --trace-redact and has no tokens, so it cannot be replayed; "
            "record the run without --trace-redact"
        )
    return Replay(header, steps, own, has_blocks=header.get("has_blocks", False)).lines()


class Replay:
    """An engine that receives the recorded requests and aborts in their recorded order."""

    def __init__(
        self,
        header: Line,
        steps: list[Line],
        own: Container[str] = READY_MADE,
        *,
        has_blocks: bool = False,
        executor: Callable[[VirtualClock, list[Line], Outputs], RecordedExecutor] | None = None,
    ) -> None:
        self._steps = steps
        self._clock, self._lines = VirtualClock(), list[Line]()
        self.scheduler = Scheduler(read_preset(header["config"], own=own))
        self._known: dict[str, Request] = {}
        self.outputs: Outputs = {}
        self._reasons: dict[str, str] = {}  # finish reasons for aborts: abort or stop
        self._aborts: list[tuple[str, int]] = []  # aborts while the previous plan was in flight
        self._ends = defaultdict[str, deque[Line]](deque)  # an id may be used several times
        for end in (end for line in steps for end in line.get("finished", ())):
            self._ends[end["id"]].append(end)
        self.engine = Engine(
            self.scheduler,
            (executor or RecordedExecutor)(self._clock, steps, self.outputs),
            self._clock,
            async_scheduling=header["async_scheduling"],
            observers=[
                lambda report: self._lines.append(describe_step(report, has_blocks=has_blocks))
            ],
        )

    def lines(self) -> Iterator[Line]:
        """The steps, decided again. ReplayMismatch as for `step`."""
        for line in self._steps:
            yield from self.step(line)
        yield from self._finish()

    def step(self, line: Line) -> list[Line]:
        """Submit what the line records and take its step. ReplayMismatch if the step failed."""
        if any(end["finish_reason"] == "error" for end in line.get("finished", ())):
            raise ReplayMismatch(
                f"step {line['step']}: a step of the recorded run failed; "
                "only runs without failed steps can be replayed"
            )
        added, aborted = line.get("added", []), line.get("aborted", [])
        num_added, num_aborted = line.get("num_early", (0, 0))
        is_drained = self.engine.num_in_flight > line.get("in_flight", 0)
        if not is_drained:
            num_added, num_aborted = len(added), len(aborted)
        self._submit(added[:num_added], self._aborts + aborted[:num_aborted], 0)
        if is_drained:
            self.engine.step()
        self._clock.advance_to(line["t"])
        self._submit(added[num_added:], aborted[num_aborted:], num_added)
        if reset := line.get("reset"):
            self.scheduler.reset_cache(force=reset[0] > 0)
        self.engine.step()
        self._aborts = line.get("aborted_in_flight", [])
        return self._take_lines()

    def fork(self, coming: list[Line]) -> None:
        """Stop following the recorded steps; `coming` requests arrive at their recorded times."""
        self._coming = deque(coming)
        executor = self.engine.executor
        assert isinstance(executor, RecordedExecutor)
        executor.is_forked = True

    def step_on(self) -> list[Line] | None:
        """One step after a fork; None if no work is left."""
        while self._coming and self._coming[0]["arrival"] <= self._clock.now():
            self._add(self._coming.popleft())
        if self.engine.has_work:
            self.engine.step()
        elif self._coming:
            self._clock.advance_to(self._coming[0]["arrival"])
        else:
            return None
        return self._take_lines()

    def _finish(self) -> Iterator[Line]:
        """Run until no work is left."""
        self._submit([], self._aborts, 0)
        while self.engine.has_work:
            self.engine.step()
            yield from self._take_lines()

    def _submit(self, added: list[Line], aborted: list[tuple[str, int]], num_before: int) -> None:
        """Add and abort requests in the recorded order; `num_before` were added earlier."""
        for number, entry in enumerate([*added, None], start=num_before):
            for id in [id for id, after in aborted if max(after, num_before) == number]:
                self.scheduler.abort(id, self._reasons.get(id, "abort"))
            if entry is not None:
                self._add(entry)

    def _add(self, entry: Line) -> None:
        request = self._known[entry["id"]] = request_of(entry, self._known)
        ends = self._ends[request.id]
        end = ends.popleft() if ends else None
        self.outputs[request] = list(unpack_tokens(end["output"])) if end else []
        self._reasons[request.id] = end["finish_reason"] if end else "abort"
        self.scheduler.add(request)

    def _take_lines(self) -> list[Line]:
        lines, self._lines = self._lines, []
        return lines


def check_replay(trace: Iterable[Line], own: Container[str] = READY_MADE) -> int:
    """Replay a trace and return the number of equal steps.

    ReplayMismatch names the first step that differs. ConfigError as for `replay`.
    """
    lines, num_equal = list(trace), 0
    for recorded, again in zip_longest(lines[1:], replay(lines, own)):
        if recorded is None or again is None:
            line, name = (again, "replay") if recorded is None else (recorded, "record")
            raise ReplayMismatch(f"only the {name} has step {line['step']}")
        if decisions(recorded) != decisions(again):
            config = lines[0]["config"]
            found = differences(recorded, again, ("the record", "the replay"), (config, config))
            raise ReplayMismatch(f"step {recorded['step']}: {'; '.join(found)}")
        num_equal += 1
    return num_equal
