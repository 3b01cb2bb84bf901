"""A recorded run with another future: the scheduler repeats it up to a step and then goes on alone.

Before the first edit everything is as recorded. After it, requests arrive when they did and generate
the recorded tokens. How long a step takes is estimated: by the profile, scaled to the steps that
were recorded before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import fields, replace

from headway.engine.clock import VirtualClock
from headway.errors import ConfigError, HeadwayError
from headway.executor.simulated import SimulatedHandle
from headway.lab.film.format import FilmWriter, header_record
from headway.lab.film.recorder import PolicyRecorder
from headway.lab.film.spec import Edit, RunSpec, described, profile_of
from headway.lab.film.texts import FilmTexts
from headway.lab.replay import Outputs, RecordedExecutor, Replay
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace
from headway.observe.trace import Line
from headway.plan import Plan
from headway.record.stats import RunStats
from headway.scheduler.policy_text import READY_MADE
from headway.scheduler.presets import describe, read_preset


class ForkedExecutor(RecordedExecutor):
    """Returns recorded times until `is_forked` is set, and estimates them from then on."""

    def __init__(
        self, clock: VirtualClock, steps: list[Line], outputs: Outputs,
        seconds: Callable[[Plan], float],
    ) -> None:  # fmt: skip
        super().__init__(clock, steps, outputs)
        self.is_forked = False
        self._seconds = seconds
        self._recorded = self._estimated = 0.0
        self._free_at = 0.0

    def launch(self, plan: Plan) -> SimulatedHandle:
        estimate = self._seconds(plan)
        if self.is_forked:
            scale = self._recorded / self._estimated if self._estimated else 1.0
            started = max(self._clock.now(), self._free_at)
            self._times.appendleft((started, started + scale * estimate))
        handle = super().launch(plan)
        result = handle.result
        self._free_at = result.ended
        if not self.is_forked:
            self._recorded += result.ended - result.started
            self._estimated += estimate
        return handle


class ForkedRun:
    """The film of a recorded run with edits; `own` has the `module:function` to be imported."""

    def __init__(self, lines: list[Line], spec: RunSpec, own: Container[str] = READY_MADE) -> None:
        self._own = own
        self._head, *self._steps = lines
        if self._head.get("is_redacted"):
            raise ConfigError(
                "a redacted trace has no tokens, so its run cannot be repeated or edited"
            )
        self._edits = deque(sorted(spec.edits, key=lambda edit: edit.step))
        self._space, profile = TokenSpace(), profile_of(spec)
        size = self._head["config"]["block_size"]

        def executor(clock: VirtualClock, steps: list[Line], outputs: Outputs) -> ForkedExecutor:
            seconds: Callable[[Plan], float] = lambda plan: profile.step_seconds(plan, size)  # noqa: E731
            return ForkedExecutor(clock, steps, outputs, seconds)

        self._replay = Replay(self._head, self._steps, own, has_blocks=True, executor=executor)
        self._config = self._replay.scheduler.config  # before the recorder wraps its policies
        self._recorder = PolicyRecorder(self._replay.scheduler)

    def film(self) -> Iterator[bytes]:
        """The bytes of the film; a failure is in the end record."""
        texts, stats = FilmTexts(self._head), RunStats(self._head)
        writer, error = FilmWriter(self._head["config"]), ""
        yield header_record({**self._head, "has_blocks": True}, source="fork")
        try:
            for line in self._lines(texts):
                stats.add(line)
                if chunk := writer.add(line, texts.follow(line, self._recorder.take(line["step"]))):
                    yield chunk
        except HeadwayError as failure:
            error = str(failure)
        yield writer.finish(summary=summarize(stats), rejected=[], error=error)

    def _lines(self, texts: FilmTexts) -> Iterator[Line]:
        replay, first = self._replay, self._edits[0].step
        rest = deque(self._steps)
        while rest and replay.scheduler.num_steps < first:
            yield from replay.step(rest.popleft())
        replay.fork([entry for line in rest for entry in line.get("added", ())])
        while True:
            while self._edits and self._edits[0].step <= replay.scheduler.num_steps:
                self._apply(self._edits.popleft(), texts)
            lines = replay.step_on()
            if lines is None:
                return
            yield from lines

    def _apply(self, edit: Edit, texts: FilmTexts) -> None:
        replay = self._replay
        if edit.abort is not None:
            replay.engine.abort(edit.abort)
        elif edit.add is not None:
            request = described(edit.add, self._space, f"added at {edit.step}")
            for sample in replay.engine.add(request.id, request.prompt(), request.params()):
                replay.outputs[sample] = [sample.prompt[-1]] * request.num_output
        else:
            values = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
            config = read_preset({**values, **(edit.set or {})}, own=self._own)
            config = replace(config, max_model_len=self._config.max_model_len)
            self._recorder.reconfigure(config)
            texts.config.update(describe(config))


def fork(lines: list[Line], spec: RunSpec, own: Container[str] = READY_MADE) -> Iterator[bytes]:
    """A film of a recorded run with the edits of a description."""
    return ForkedRun(lines, spec, own).film()
