"""The sentences of a recording: every decision, with what the scheduler compared.

A reason to wait is given when it changes, not in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.events import Event, Planned, Reconfigured
from headway.plan import Plan
from headway.record.sentences import Alternatives, Decision, DecisionLog, preempted, waits


class RecordingTexts:
    """Follows a run event by event."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._log = DecisionLog(config["max_num_seqs"])

    def follow(self, event: Event) -> Iterator[Decision]:
        """The sentences of the next event."""
        if isinstance(event, Reconfigured):
            self._config = event.settings
        for decision in self._log.follow(event):
            if isinstance(event, Planned) and event.plan.answers is not None:
                yield self._explained(decision, event.plan)
            else:
                yield decision

    def _explained(self, decision: Decision, plan: Plan) -> Decision:
        """The decision with what was compared, if that is known."""
        answers, request = plan.answers, decision.request
        assert answers is not None
        if request in answers.num_candidates and decision.kind == "preempted":
            found = next(each for each in plan.preempted if each.request is request)
            alternatives = Alternatives(
                str(self._config["victim"]), answers.num_candidates[request],
                answers.swap_seconds.get(request),
            )  # fmt: skip
            return decision._replace(text=preempted(found, alternatives))
        if request in answers.headroom and decision.kind == "waiting":
            blocked = next(each for each in plan.blocked if each.request is request)
            rule, headroom = str(self._config["headroom"]), answers.headroom[request]
            return decision._replace(text=waits(request.id, *blocked[1:], headroom, rule))
        return decision
