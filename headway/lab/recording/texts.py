"""The sentences of a recording: every decision, with what the scheduler compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.events import Answers, Event, Planned, Reconfigured
from headway.plan import Plan
from headway.record.sentences import Alternatives, Decision, DecisionLog, preempted, waits


class RecordingTexts:
    """Follows a run event by event. A reason to wait is given when it changes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._log = DecisionLog(config["max_num_seqs"])

    def follow(self, event: Event) -> list[Decision]:
        """The sentences of the next event."""
        if isinstance(event, Reconfigured):
            self._config = event.settings
        decisions = self._log.follow(event)
        if isinstance(event, Planned) and event.answers is not None:
            return [self._explained(each, event.plan, event.answers) for each in decisions]
        return decisions

    def _explained(self, decision: Decision, plan: Plan, answers: Answers) -> Decision:
        """The decision with what was compared, if that is known."""
        request, text = decision.request, decision.text
        if request is None:
            return decision
        if decision.kind == "preempted" and request in answers.num_candidates:
            found = next(each for each in plan.preempted if each.request is request)
            rule, seconds = str(self._config["victim"]), answers.swap_seconds.get(request)
            text = preempted(found, Alternatives(rule, answers.num_candidates[request], seconds))
        elif decision.kind == "waiting" and request in answers.headroom:
            blocked = next(each for each in plan.blocked if each.request is request)
            rule, headroom = str(self._config["headroom"]), answers.headroom[request]
            text = waits(request.id, *blocked[1:], headroom, rule)
        return decision._replace(text=text)
