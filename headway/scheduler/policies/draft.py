"""Draft rules: how many tokens to draft for a decoding request in a step; 0 is allowed.

A step asks for the requests whose drafts were right most often first, and no more requests after a
rule has answered 0. Drafts beyond the token budget, the free blocks or the request's limit are left
out, and those that the drafter does not make.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.checks import Checked, count
from headway.config import DraftStep
from headway.request import Request
from headway.scheduler.policies.costs import StepCosts

MAX_DRAFTS = 128  # of a request in a step


@dataclass(frozen=True)
class fixed(Checked):
    """Draft `tokens` for every request."""

    tokens: int = count(4, 1, MAX_DRAFTS)

    def __call__(self, request: Request, step: DraftStep) -> int:
        return self.tokens


@dataclass(frozen=True)
class by_cost(StepCosts):
    """Draft as many tokens, at most `most`, as give the step the most tokens per second.

    The probability of a draft comes from the request's latest drafts, the time of the step from the
    costs: a row is nearly free while reading the weights takes longer than computing. So the number
    goes to 0 as the batch grows.
    """

    most: int = count(8, 1, MAX_DRAFTS)

    def __call__(self, request: Request, step: DraftStep) -> int:
        costs, start, share = self.costs, request.num_computed, step.acceptance(request)
        best, chosen, tokens = step.tokens / costs.seconds(*step.work), 0, step.tokens
        for number in range(1, self.most + 1):
            tokens += share**number
            work = step.work.with_more_rows(start, number)
            rate = tokens / costs.seconds(*work)
            if rate > best:
                best, chosen = rate, number
        return chosen
