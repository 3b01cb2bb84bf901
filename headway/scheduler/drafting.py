"""Makes the drafts of a scheduler, and keeps count of how often they are right.

Knows no plans in flight and no blocks; draft_planning.py chooses the requests of a step.
"""

from __future__ import annotations

from headway.config import Drafter, DrafterRule
from headway.drafters.ngram import ngram
from headway.drafters.prediction import PredictionDrafter
from headway.plan import Draft
from headway.request import Request
from headway.scheduler.acceptance import Acceptance
from headway.scheduler.policy_calls import DRAFTER, checked
from headway.step_cost import StepWork

MAX_PAUSE = 32  # tokens until a request whose drafter found nothing is asked again


class Drafting:
    """The drafts of one scheduler, and what a draft rule may read (config.DraftStep)."""

    def __init__(self, rule: DrafterRule | None) -> None:
        self.rule = rule
        self._drafter: Drafter = (rule or ngram())()
        self._propose = checked(DRAFTER, self._drafter)
        self._predictions = PredictionDrafter()  # asked first, for requests with a prediction
        self._estimate = Acceptance()
        self.work, self.num_left = StepWork(0, 0, 0, 0.0), 0
        self.tokens = 0.0

    def begin(self, num_rows: int, context: int, num_left: int) -> None:
        """Begin a step with this many decodes, of which `num_left` may get drafts."""
        self.work, self.num_left = StepWork(num_rows, num_rows, context, float(context)), num_left
        self.tokens = float(num_rows)

    def add(self, draft: Draft) -> None:
        """The step has these drafts."""
        self.work = self.work.with_more_rows(draft.start, draft.count)
        share = self.acceptance(draft.request)
        self.tokens += sum(share**number for number in range(1, draft.count + 1))

    def record(self, draft: Draft, num_right: int) -> None:
        """Count how many drafts of a request were right."""
        self._estimate.record(draft.request, draft.count, num_right)
        draft.request.history.drafts_from = draft.start + num_right + 1

    def acceptance(self, request: Request) -> float:
        """The probability that the next draft of a request is right."""
        return self._estimate.of(request)

    def forget(self, request: Request) -> None:
        """The request has ended, or its output was discarded."""
        self._drafter.forget(request)
        self._predictions.forget(request)

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """Drafts; if there are none, the request is left alone for some tokens."""
        history = request.history
        tokens: tuple[int, ...] = ()
        if most > 0:
            predicted = self._predictions.propose(request, most)
            tokens = tuple(predicted or self._propose(request, most))[:most]
        if tokens:
            history.num_misses = 0
        else:
            history.num_misses += 1
            pause = min(MAX_PAUSE, 1 << min(history.num_misses, 16))
            history.drafts_from = request.num_computed + pause
        return tokens
