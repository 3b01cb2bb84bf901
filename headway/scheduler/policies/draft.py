"""Draft rules: how many tokens to draft for a decoding request in a step; 0 is allowed.

A step asks for the requests whose drafts were right most often first, and no more requests after a
rule has answered 0. Drafts beyond the token budget, the free blocks or the request's limit are left
out, and those that the drafter does not make.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.checks import Checked, count, number
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

    The number is the best one if all requests that are still to be asked had as many drafts, right
    as often as those of this request. The time of the step comes from the costs: a row is nearly
    free while reading the weights takes longer than computing. So the number goes to 0 as the batch
    grows. `wait` is the time of planning a step, which a step with drafts adds to the next one,
    and `verify` the time that a step with drafts takes longer than its rows.
    """

    most: int = count(8, 1, MAX_DRAFTS)
    wait: float = number(0.0, 0)
    verify: float = number(0.0, 0)

    def __call__(self, request: Request, step: DraftStep) -> int:
        seconds, start, share = self.costs.seconds, request.num_computed, step.acceptance(request)
        (tokens, samples, reads, pairs), kept, num_left = step.work, step.tokens, step.num_left
        now, longer = seconds(tokens, samples, reads, pairs), self.wait + self.verify
        has_drafts = kept < tokens
        best = kept / (now + longer if has_drafts else max(now, self.wait))
        chosen, right = 0, 1.0
        for length in range(1, self.most + 1):
            right *= share
            kept += num_left * right
            more = num_left * length
            attended = pairs + more * (start + (length + 3) / 2)
            later = seconds(tokens + more, samples + more, reads + more, attended)
            rate = kept / (later + longer)
            if rate > best:
                best, chosen = rate, length
            elif chosen:  # it only falls from here on
                break
        return chosen
