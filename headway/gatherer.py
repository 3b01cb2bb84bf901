"""From what steps report to the results of those who asked, as an observer of their engine."""

from __future__ import annotations

from headway.engine.clock import Clock
from headway.engine.outputs import ResultBuilder
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.plan import StepReport
from headway.request import Request


class OutputCollector:
    """Hands every report's tokens, times and ends to the results they belong to."""

    def __init__(self, clock: Clock) -> None:
        self.gatherings: dict[Request, ResultBuilder] = {}
        self.kept: dict[Request, int] = {}  # tokens before a stop string, of those that hit one
        self._clock = clock

    def clear(self) -> None:
        self.gatherings.clear()
        self.kept.clear()

    def __call__(self, report: StepReport) -> None:
        if not self.gatherings:
            return  # somebody else asks this engine, such as a server
        now, extra = report.result.ended, report.result.extra
        for request in (admission.request for admission in report.plan.admitted):
            gathering = self.gatherings.get(request)  # None: it ended before it was reported
            if gathering and not gathering.result.timings.queue:
                gathering.result.timings.queue = report.plan.events.schedule_ended - request.arrival
        for request in (chunk.request for chunk in report.plan.chunks if chunk.is_last):
            gathering = self.gatherings.get(request)
            if gathering and not gathering.result.timings.first_token:
                gathering.result.timings.first_token = now - request.arrival
        if isinstance(extra, ExtraOutputs):
            self._keep_extra(extra)
        if any(gathering.is_read for gathering in self.gatherings.values()):
            self._push(report)
        for request in report.finished:
            self._finish(request, now)

    def _push(self, report: StepReport) -> None:
        for request, tokens in report.outputs():
            gathering = self.gatherings.get(request)
            if gathering is None or not gathering.is_read or gathering.hit(request) is not None:
                continue
            text, num_kept = gathering.push(request, tokens)
            if gathering.hit(request) is not None:
                num_before = request.num_generated - len(tokens)
                self.kept[request] = num_before + num_kept
            gathering.tell(request, text, tokens[:num_kept])

    def _keep_extra(self, extra: ExtraOutputs) -> None:
        for request, found in extra.logprobs.items():
            if gathering := self.gatherings.get(request):  # else it ended while this was in flight
                gathering.result.samples[request.sample].logprobs += found  # type: ignore[operator]
        for request, scores in extra.prompt.items():
            if gathering := self.gatherings.get(request):
                for place, score in scores:
                    gathering.result.prompt_logprobs[place] = score  # type: ignore[index]
        for request, embedding in extra.embeddings.items():
            if gathering := self.gatherings.get(request):
                gathering.result.embedding = embedding

    def _finish(self, request: Request, now: float) -> None:
        gathering = self.gatherings.pop(request)
        num_kept = self.kept.pop(request, request.num_generated)
        rest = gathering.finish(request, num_kept)
        ended = now or self._clock.now()
        gathering.result.timings.total = ended - request.arrival
        if gathering.is_read:
            gathering.tell(
                request, rest, [], gathering.result.samples[request.sample].finish_reason
            )
