"""The time of a forward pass, from the tokens that it computes, samples, reads and attends to.

Simulated executors, the fit of a profile and the chunk rule `hold_tbt` use the same formula. A pass
takes a fixed time, which is longer if it computes prompts, plus the longer of reading the weights
and the matrix products, plus the longer of reading keys and values and the attention products, plus
the exchange between devices. With experts, a pass reads those that its tokens use, if each token
chooses them independently of the others. Reads no clock: the numbers come from a profile or from a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headway.plan import Plan


class UnitCosts(NamedTuple):
    """Seconds per unit of work."""

    weights: float  # reading all weights
    token: float
    sample: float
    read: float  # keys and values of one token
    pair: float  # one query token and one token that it attends to
    fixed: float
    min_attention: float
    overlap: float  # of reading and computing: 1 hides the shorter completely, 0 adds it
    exchange: float = 0.0  # between the devices of a tensor-parallel group, per token
    prompt: float = 0.0  # fixed, in addition, if more tokens are computed than sampled
    experts: float = 0.0  # reading all experts
    unchosen: float = 1.0  # the share of experts that a token does not use

    def seconds(
        self, tokens: int, samples: int, reads: int, pairs: float,
        larger: Callable[..., float] = max, smaller: Callable[..., float] = min,
    ) -> float:  # fmt: skip
        """Time of a forward pass: tokens computed, sampled and read, and attended pairs.

        Times of many passes, if all these are arrays, with the functions of arrays.
        """
        (
            weights, token, sample, read, pair, fixed, min_attention, overlap, exchange, prompt,
            experts, unchosen,
        ) = self  # fmt: skip
        if experts:
            weights += experts * (1 - unchosen**tokens)
        dense, reading, computing = tokens * token + samples * sample, reads * read, pairs * pair
        linear, attention = larger(dense, weights), larger(reading, computing)
        if overlap < 1:
            linear += (1 - overlap) * smaller(dense, weights)
            attention += (1 - overlap) * smaller(reading, computing)
        start = fixed + (tokens > samples) * prompt if prompt else fixed
        return start + linear + larger(attention, min_attention) + tokens * exchange


class StepWork(NamedTuple):
    """The work of the first forward pass of a plan."""

    tokens: int
    samples: int
    reads: int
    pairs: float

    def with_chunk(self, start: int, end: int, *, is_last: bool) -> StepWork:
        """The work with tokens [start, end) of a prompt in addition."""
        return self._with_rows(start, end, int(is_last))

    def with_draft(self, start: int, end: int) -> StepWork:
        """The work with tokens [start, end) of a request in addition, after each of which is sampled."""
        return self._with_rows(start, end, end - start)

    def with_more_rows(self, start: int, count: int) -> StepWork:
        """The work with `count` drafts of a request in addition, whose decode from `start` is in it."""
        return StepWork(
            self.tokens + count,
            self.samples + count,
            self.reads + count,
            self.pairs + count * (start + (count + 3) / 2),
        )

    def _with_rows(self, start: int, end: int, samples: int) -> StepWork:
        count = end - start
        return StepWork(
            self.tokens + count,
            self.samples + samples,
            self.reads + end,  # a later chunk reads the tokens of the earlier ones again
            self.pairs + count * (start + (count + 1) / 2),
        )


def work_of(plan: Plan) -> StepWork:
    """The work of a plan; also of one that is under construction."""
    num_rows, context = len(plan.decodes), plan.decode_context
    work = StepWork(num_rows, num_rows, context, float(context))
    for draft in plan.drafts:
        work = work.with_draft(draft.start, draft.end)
    for _, start, end, _, is_last in plan.chunks:
        work = work.with_chunk(start, end, is_last=is_last)
    return work
