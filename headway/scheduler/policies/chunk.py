"""Chunk rules: the tokens of a prompt to compute now, given (wanted, left, first of its step)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from headway.checks import Checked, count, number
from headway.step_cost import StepWork, UnitCosts


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
class hold_tbt(Checked):
    """Split any prompt; while requests decode, as much of prompts as keeps a step under `seconds`.

    The first prompt of a step gets at least one block, even if the decodes alone take longer. All
    other numbers are the cost of a step, in seconds, as in step_cost.UnitCosts. A simulation takes
    them from its profile, a model that is loaded from a measurement. The defaults are for an 8B
    model on an A100.
    """

    seconds: float = number(0.1, 0)
    weights: float = number(9.2e-3, 0)
    token: float = number(7.5e-5, 0)
    sample: float = number(5.6e-6, 0)
    read: float = number(8e-8, 0)
    pair: float = number(2.8e-9, 0)
    fixed: float = number(1.5e-3, 0)
    min_attention: float = number(3e-4, 0)
    overlap: float = number(1.0, 0, 1)
    exchange: float = number(0.0, 0)
    prompt: float = number(0.0, 0)
    experts: float = number(0.0, 0)
    unchosen: float = number(1.0, 0, 1)

    def __call__(self, want: int, left: int, is_first: bool) -> int:
        return min(want, left)

    @property
    def has_default_costs(self) -> bool:
        return self == hold_tbt(self.seconds)

    def with_costs(self, costs: UnitCosts) -> hold_tbt:
        return hold_tbt(self.seconds, **costs._asdict())

    def most_tokens(self, want: int, work: StepWork, start: int) -> int:
        """Tokens, at most `want`, of a prompt from `start` on that fit into a step with this work."""
        costs = UnitCosts(*(getattr(self, name) for name in UnitCosts._fields))

        def is_too_long(count: int) -> bool:
            with_chunk = work.with_chunk(start, start + count, is_last=True)
            return costs.seconds(*with_chunk) > self.seconds

        return bisect_left(range(1, want + 1), True, key=is_too_long)
