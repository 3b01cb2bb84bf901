"""Repeats a journal: the same calls of another scheduler must give the same events.

Times and sampled tokens come from the journal; the scheduler decides everything again. If all
events are equal, the scheduling error of the simulator is exactly zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping

from headway.config import Config
from headway.errors import ConfigError, PolicyError, ReplayMismatch, RequestError
from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    Reconfigured,
    Reset,
)
from headway.plan import UNKNOWN_TOKEN, Column, Draft, Plan, StepResult
from headway.record.diff import differences
from headway.record.lines import HeaderLine, Line
from headway.record.reader import MALFORMED, EventReader, split_header
from headway.record.writer import LineMaker
from headway.request import Request
from headway.scheduler import Scheduler
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.text import READY_MADE

AFTER_END = -1  # the token after the recorded output of a request, where none is kept
Tokens = tuple[list[Column], list[int]]  # of the decodes, by step, and of last chunks


class RecordedTokens:
    """Samples the tokens that requests had when they were recorded, at their places."""

    def __init__(self) -> None:
        self._outputs: dict[Request, list[int]] = {}
        self._num_sampled: dict[Request, int] = {}

    def add(self, request: Request, output: Iterable[int]) -> None:
        self._outputs[request] = list(output)

    def sample(self, plan: Plan) -> Tokens:
        """The tokens of a plan; call it for every plan with work, in order."""
        for chunk in plan.chunks:
            self._num_sampled[chunk.request] = chunk.end - chunk.request.num_prompt
        num_columns = plan.num_steps if plan.decodes else 0
        columns: list[Column] = [list(map(self._next, plan.decodes)) for _ in range(num_columns)]
        return columns, [self._next(chunk.request) for chunk in plan.chunks if chunk.is_last]

    def gained(self, draft: Draft, num_gained: int) -> list[int]:
        """As many tokens as a request gained with these drafts, and at least one."""
        return [self._next(draft.request) for _ in range(max(1, num_gained))]

    def verified(self, draft: Draft, most: int | None = None) -> list[int]:
        """The drafts that may be the recorded tokens, `most` at most, and the token after them."""
        tokens = self.gained(draft, 1)
        for token in draft.tokens[:most]:
            if token not in (tokens[-1], UNKNOWN_TOKEN):
                break
            tokens.append(self._next(draft.request))
        return tokens

    def _next(self, request: Request) -> int:
        place = self._num_sampled[request]
        self._num_sampled[request] = place + 1
        output = self._outputs[request]
        return output[place] if place < len(output) else AFTER_END


class Replay:
    """A scheduler whose calls follow recorded events. All of these must have been read before."""

    def __init__(
        self, config: Config, own: Container[str] = READY_MADE, *, records_answers: bool = False
    ) -> None:
        self.scheduler, self._own = Scheduler(config, records_answers=records_answers), own
        self.tokens = RecordedTokens()
        self.requests: dict[Request, Request] = {}  # by the recorded request
        self._sampled: deque[Tokens] = deque()  # of the plans in flight
        self._events: list[Event] = []
        self.scheduler.observe(self._events.append)

    def repeat(self, recorded: Event) -> Event:
        """Make the call of an event again; ReplayMismatch if it is not possible or has no effect."""
        self._events.clear()
        try:
            self._call(recorded)
        except PolicyError as error:
            problem = f"a policy failed that did not when it was recorded: {error}"
            raise ReplayMismatch(problem) from error
        if not self._events:
            raise ReplayMismatch(f"{type(recorded).__name__} changes nothing in the replay")
        event = self._events.pop()
        event.time = recorded.time
        if isinstance(event, Planned) and isinstance(recorded, Planned):
            event.began = recorded.began
        return event

    def _call(self, recorded: Event) -> None:
        scheduler = self.scheduler
        match recorded:
            case Planned():
                self._plan(recorded)
            case Completed():
                self._complete(recorded)
            case Added():
                scheduler.add(*map(self.copy, recorded.requests))
            case Aborted(request):
                scheduler.abort(request.id, request.finish_reason or "abort", request.error)
            case Reset():
                scheduler.reset_cache(force=recorded.is_forced)
            case Reconfigured(settings, config):
                scheduler.reconfigure(config or read_preset(dict(settings), own=self._own))
            case Failed():
                self._sampled.clear()
                scheduler.fail(recorded.reason)

    def in_flight(self, recorded: Mapping[int, StepResult]) -> Iterator[tuple[Plan, StepResult]]:
        """The plans in flight with their tokens, and the times of these results, if they have one."""
        for planned, sampled in zip(self.scheduler.in_flight, self._sampled, strict=True):
            plan = planned.plan
            yield plan, self._result(plan, sampled, recorded.get(plan.step))

    def copy(self, recorded: Request) -> Request:
        """The recorded request as it was when it was added."""
        parent = recorded.parent and self.requests.get(recorded.parent, recorded.parent)
        request = Request(
            recorded.id, recorded.prompt, recorded.params, arrival=recorded.arrival, parent=parent,
            sample=recorded.sample, output=recorded.history.resumed,
        )  # fmt: skip
        self.requests[recorded] = request
        self.tokens.add(request, recorded.output)
        return request

    def _complete(self, recorded: Completed) -> None:
        if not self.scheduler.in_flight:
            raise ReplayMismatch(f"the replay has no step {recorded.plan.step}")
        plan = self.scheduler.in_flight[0].plan
        result = self._result(plan, self._sampled.popleft(), recorded.result)
        result.failed = {self.requests[r]: failure for r, failure in recorded.result.failed.items()}
        self.scheduler.complete(plan, result)

    def _result(self, plan: Plan, sampled: Tokens, recorded: StepResult | None) -> StepResult:
        """The result of a plan; without a recorded one it has no times."""
        result = StepResult(*sampled)
        if recorded is None:
            result.draft_tokens = list(map(self.tokens.verified, plan.drafts))
            return result
        result.started, result.ended = recorded.started, recorded.ended
        result.swap_in, result.num_builds = recorded.swap_in, recorded.num_builds
        counts = map(len, recorded.draft_tokens)
        result.draft_tokens = list(map(self.tokens.gained, plan.drafts, counts))
        return result

    def _plan(self, recorded: Planned) -> None:
        try:
            plan = self.scheduler.schedule()
        except PolicyError:
            if not recorded.has_failed:
                raise
            return
        if recorded.has_failed:
            raise ReplayMismatch("no policy fails in the replay")
        if not plan.is_empty:
            self._sampled.append(self.tokens.sample(plan))


def check_replay(journal: Iterable[HeaderLine | Line], own: Container[str] = READY_MADE) -> int:
    """Repeat a journal, recorded to the end of its run, and return the number of its steps.

    ReplayMismatch names the first step that differs. ConfigError if the journal is redacted, or
    names a `module:function` that is not in `own`.
    """
    header, lines = split_header(journal)
    if header.is_redacted:
        raise ConfigError(
            "the trace was recorded with --trace-redact and has no tokens, so it cannot be replayed; "
            "record the run without --trace-redact"
        )
    maker, recorded = LineMaker(has_blocks=header.has_blocks), _events(header, lines)
    again, num_steps = Replay(read_preset(header.config, own=own), own), 0
    for line, event in recorded:
        step = event.plan.step if isinstance(event, Completed) else num_steps
        try:
            repeated = again.repeat(event)
        except (ReplayMismatch, RequestError) as error:
            raise ReplayMismatch(f"step {step}: {error}") from None
        if maker.line(repeated) != line:
            names, headers = ("the record", "the replay"), (header, header)
            found = differences([event], [repeated], names, headers, has_blocks=header.has_blocks)
            raise ReplayMismatch(f"step {step}: {'; '.join(found)}")
        num_steps += isinstance(event, Planned) and not event.plan.is_empty
    if num_open := len(again.scheduler.requests):
        raise ReplayMismatch(f"step {num_steps}: the record ends, but {num_open} requests have not")
    return num_steps


def _events(header: HeaderLine, lines: Iterable[Line]) -> list[tuple[Line, Event]]:
    """The lines with their events; ReplayMismatch if one does not continue the run."""
    reader, found, num_steps = EventReader(header), list[tuple[Line, Event]](), 0
    for line in lines:
        try:
            event = reader.event(line)
        except MALFORMED as error:
            problem = f"{type(error).__name__}: {error}"
            raise ReplayMismatch(
                f"step {num_steps}: the record does not continue the run: {problem}"
            ) from None
        found.append((line, event))
        num_steps += isinstance(event, Planned) and not event.plan.is_empty
    return found
