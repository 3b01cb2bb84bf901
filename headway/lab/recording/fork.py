"""A recorded run with another future: the scheduler repeats it up to a step and then goes on alone.

Before the first edit everything is as recorded. After it, requests arrive when they did and generate
the recorded tokens. How long a step takes is estimated: by the profile, scaled to the steps that
were recorded before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import fields, replace

from msgspec.structs import replace as changed

from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.events import Added, Completed, Event, Planned
from headway.executor.simulated import SimulatedHandle
from headway.lab.cost import load_profile
from headway.lab.recording.run import Recorder
from headway.lab.recording.spec import Edit, RunSpec, described
from headway.lab.workload.request import TokenSpace
from headway.plan import UNKNOWN_TOKEN, Draft, Plan, StepResult
from headway.record.lines import HeaderLine, Line
from headway.record.reader import EventReader, split_header
from headway.record.replay import RecordedTokens, Replay
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.text import READY_MADE


class ForkedExecutor:
    """Samples recorded tokens, and estimates times at the pace of the recorded steps."""

    def __init__(
        self,
        clock: VirtualClock,
        tokens: RecordedTokens,
        seconds: Callable[[Plan], float],
        wrong: Mapping[str, Container[int]],
        is_simulated: bool,
    ) -> None:
        """`wrong` are the places where drafts were wrong, by request."""
        self._clock, self._tokens, self._seconds = clock, tokens, seconds
        self._wrong, self._is_simulated = wrong, is_simulated
        self._recorded = self._estimated = self._free_at = 0.0

    def compare(self, event: Completed) -> None:
        """Learn the pace from a recorded step."""
        self._recorded += event.result.ended - event.result.started
        self._estimated += self._seconds(event.plan)
        self._free_at = event.result.ended

    def launch(self, plan: Plan) -> SimulatedHandle:
        result = StepResult(*self._tokens.sample(plan))
        result.draft_tokens = list(map(self._verify, plan.drafts))
        return self.run(plan, result)

    def _verify(self, draft: Draft) -> list[int]:
        """Drafts are right if they are the recorded tokens; without tokens, where they were right."""
        if not self._is_simulated and UNKNOWN_TOKEN not in draft.tokens:
            return self._tokens.verified(draft)
        wrong, places = self._wrong.get(draft.request.id, ()), range(draft.start + 1, draft.end)
        most = next((n for n, place in enumerate(places) if place in wrong), draft.count)
        return self._tokens.verified(draft, most)

    def run(self, plan: Plan, result: StepResult) -> SimulatedHandle:
        """A plan in flight with its result; if that has no times, they are estimated."""
        if not result.ended:
            scale = self._recorded / self._estimated if self._estimated else 1.0
            result.started = max(self._clock.now(), self._free_at)
            result.ended = result.started + scale * self._seconds(plan)
        self._free_at = result.ended
        return SimulatedHandle(self._clock, result)


class ForkedRun:
    """A recorded run with edits; `own` has the `module:function` that may be imported."""

    def __init__(
        self, journal: list[HeaderLine | Line], spec: RunSpec, own: Container[str] = READY_MADE
    ) -> None:
        self._own = own
        self.head, lines = split_header(journal)
        if self.head.is_redacted:
            raise ConfigError(
                "a redacted trace has no tokens, so its run cannot be repeated or edited"
            )
        self._recorded = deque(map(EventReader(self.head).event, lines))
        self._edits = deque(sorted(spec.edits, key=lambda edit: edit.step))
        self._space, self._clock, profile = TokenSpace(), VirtualClock(), load_profile(spec.profile)
        self._config = read_preset(self.head.config, own=own)
        self._replay = Replay(self._config, own, records_answers=True)
        self._executor = ForkedExecutor(
            self._clock, self._replay.tokens,
            lambda plan: profile.step_seconds(plan, self._config.block_size),
            _wrong_places(self._recorded), bool(self.head.profile),
        )  # fmt: skip

    def events(self) -> Iterator[Event]:
        """The recorded events up to the first edit, and those that follow from it."""
        scheduler, recorded, first = self._replay.scheduler, self._recorded, self._edits[0].step
        while recorded and not (isinstance(recorded[0], Planned) and scheduler.num_steps >= first):
            event = self._replay.repeat(recorded.popleft())
            self._clock.advance_to(event.time)
            if isinstance(event, Completed):
                self._executor.compare(event)
            yield event
        yield from self._go_on()

    def _go_on(self) -> Iterator[Event]:
        """The events after the first edit."""
        coming = deque(
            request for event in self._recorded if isinstance(event, Added)
            for request in event.requests
        )  # fmt: skip
        events, scheduler = deque[Event](), self._replay.scheduler
        engine = Engine(
            scheduler, self._executor, self._clock, observers=[events.append],
            async_scheduling=self.head.async_scheduling, in_flight=self._in_flight(),
        )  # fmt: skip
        while coming or engine.has_work or self._edits:
            while self._edits and self._edits[0].step <= scheduler.num_steps:
                self._apply(self._edits.popleft(), engine)
            while coming and coming[0].arrival <= self._clock.now():
                scheduler.add(self._replay.copy(coming.popleft()))
            if engine.has_work:
                engine.step()
            elif coming:
                self._clock.advance_to(coming[0].arrival)
            else:
                return
            while events:
                yield events.popleft()

    def _in_flight(self) -> Iterator[tuple[Plan, SimulatedHandle]]:
        """The plans whose recorded results come after the fork."""
        results = {e.plan.step: e.result for e in self._recorded if isinstance(e, Completed)}
        for plan, result in self._replay.in_flight(results):
            yield plan, self._executor.run(plan, result)

    def _apply(self, edit: Edit, engine: Engine) -> None:
        if edit.abort is not None:
            engine.abort(edit.abort)
        elif edit.add is not None:
            request = described(edit.add, self._space, f"added at {edit.step}")
            for sample in engine.add(request.id, request.prompt(), request.params()):
                self._replay.tokens.add(sample, [sample.prompt[-1]] * request.num_output)
        else:
            values = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
            config = read_preset({**values, **(edit.set or {})}, own=self._own)
            engine.scheduler.reconfigure(replace(config, max_model_len=self._config.max_model_len))


def _wrong_places(events: Iterable[Event]) -> dict[str, set[int]]:
    """The places of tokens for which a draft was wrong, by request."""
    found = defaultdict[str, set[int]](set)
    for event in events:
        for draft, num_right in event.verified() if isinstance(event, Completed) else ():
            if num_right < draft.count:
                found[draft.request.id].add(draft.start + 1 + num_right)
    return found


def fork(
    journal: list[HeaderLine | Line], spec: RunSpec, own: Container[str] = READY_MADE
) -> Iterator[bytes]:
    """The recording of a recorded run with the edits of a description."""
    run = ForkedRun(journal, spec, own)
    recorder = Recorder(changed(run.head, has_blocks=True))
    return recorder.record(map(recorder.follow, run.events()), source="fork")
