"""What a step's report says to those who asked: messages, and when things happened to each request.

Runs on the engine's thread, once a step. Knows no queues and no threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from headway.engine.engine import Engine
from headway.engine.messages import End, Tokens, Update
from headway.plan import Embedding, Plan, StepReport
from headway.request import Request
from headway.sampling_params import TokenLogprobs

NO_TOKENS: list[int] = []


class Scores(Protocol):
    """What an executor may add to a step's tokens."""

    logprobs: Mapping[Request, list[TokenLogprobs]]
    prompt: Mapping[Request, list[tuple[int, TokenLogprobs]]]
    embeddings: Mapping[Request, Embedding]


@dataclass(slots=True)
class Times:
    """When a request came, was seated and had its first token, on the engine's clock."""

    arrival: float
    seated: float | None = None
    first_token: float | None = None


class News:
    """Turns reports into messages. Keeps the times of every open request until it ends."""

    def __init__(self, engine: Engine) -> None:
        self.times: dict[Request, Times] = {}
        self._clock = engine.clock

    def expect(self, requests: Iterable[Request]) -> None:
        """These have come; they will be answered."""
        for request in requests:
            self.times[request] = Times(request.arrival)

    def of(self, report: StepReport) -> Iterator[Tokens | Update]:
        """One message for all who gained tokens; one of its own for who ended or has scores."""
        now = report.result.ended or self._clock.now()
        self._note_times(report.plan, now)
        gained = dict(report.outputs()) if report.plan.step >= 0 else {}
        ended = {request: self._end(request, now) for request in report.finished}
        extra: Scores | None = report.result.extra  # type: ignore[assignment]
        alone = dict.fromkeys(ended)
        if extra is not None:
            alone |= dict.fromkeys([r for r in gained if r in extra.logprobs])
            alone |= dict.fromkeys(extra.prompt)
        for request in alone:
            tokens = gained.pop(request, NO_TOKENS)
            yield _update(request, tokens, ended.get(request), extra)
        plain = [request for request in gained if request.parent is None]
        if plain:
            yield Tokens([request.id for request in plain], [gained[each] for each in plain])
        if len(plain) < len(gained):
            yield from (_update(r, tokens) for r, tokens in gained.items() if r.parent)

    def _note_times(self, plan: Plan, now: float) -> None:
        for admission in plan.admitted:
            times = self.times.get(admission.request)
            if times and times.seated is None:
                times.seated = plan.events.schedule_ended
        for chunk in plan.chunks:
            times = self.times.get(chunk.request)
            if times and times.first_token is None and chunk.is_last:
                times.first_token = now

    def _end(self, request: Request, now: float) -> End:
        times = self.times.pop(request, None) or Times(request.arrival)
        seated, first = times.seated or now, times.first_token or now
        return End(
            request.finish_reason or "abort", request.stop_token, request.error,
            request.history.num_cached, request.history.num_preemptions,
            seated - times.arrival, first - times.arrival, now - times.arrival,
            request.error_code,
        )  # fmt: skip


def _update(
    request: Request, tokens: list[int], end: End | None = None, extra: Scores | None = None
) -> Update:
    id = request.parent.id if request.parent else request.id
    if extra is None:
        return Update(id, request.sample, tokens, None, None, end)
    found, scores = extra.logprobs.get(request), extra.prompt.get(request)
    return Update(id, request.sample, tokens, found, scores, end, extra.embeddings.get(request))
