"""Chunk rules: the tokens of a prompt to compute now, given (wanted, left, first of its step)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from headway.checks import Checked, count, number
from headway.scheduler.policies.costs import StepCosts
from headway.step_cost import StepWork


def whole(want: int, left: int, is_first: bool) -> int:
    """All of the prompt or nothing."""
    return want if want <= left else 0


def split_first(want: int, left: int, is_first: bool) -> int:
    """Split only the first prompt of a step."""
    return min(want, left) if is_first or want <= left else 0


def split_any(want: int, left: int, is_first: bool) -> int:
    """Split any prompt that does not fit."""
    return min(want, left)


@dataclass(frozen=True)
class at_most(Checked):
    """Split any prompt; at most `tokens` of one prompt in a step."""

    tokens: int = count(512, 1)

    def __call__(self, want: int, left: int, is_first: bool) -> int:
        return min(want, left, self.tokens)


@dataclass(frozen=True)
class hold_tbt(StepCosts):
    """Split any prompt; while requests decode, as much of prompts as keeps a step under `seconds`.

    The first prompt of a step gets at least one block, even if the decodes alone take longer.
    """

    seconds: float = number(0.1, 0)

    def __call__(self, want: int, left: int, is_first: bool) -> int:
        return min(want, left)

    def most_tokens(self, want: int, work: StepWork, start: int) -> int:
        """Tokens, at most `want`, of a prompt from `start` on that fit into a step with this work."""
        costs = self.costs

        def is_too_long(count: int) -> bool:
            with_chunk = work.with_chunk(start, start + count, is_last=True)
            return costs.seconds(*with_chunk) > self.seconds

        return bisect_left(range(1, want + 1), True, key=is_too_long)
