"""Ready-made batching, chunk, victim and swap rules; the others are in queues.py and headroom.py.

A policy without numbers is a function. A policy with numbers is a callable frozen dataclass: it
compares by value, prints as it is written on the command line, and keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headway.checks import Checked, count, number
from headway.config import SchedulerView, StepActions
from headway.request import Request
from headway.step_cost import StepWork, UnitCosts

# batching: the actions of a step, in order


def mixed(step: StepActions) -> None:
    """Decodes first, then partially prefilled prompts, then waiting requests, in one batch."""
    step.decode()
    step.prefill()
    step.admit()


def swapped_first(step: StepActions) -> None:
    """As mixed, but swapped requests are admitted before anything else."""
    step.admit_swapped()
    mixed(step)


MAX_PREFILL_STEPS = 16  # consecutive, while decodes wait


def prefill_first(step: StepActions) -> None:
    """Only prompts or only decodes in a step, prompts first; decodes run after 16 prompt steps."""
    if step.num_decoding and step.prefill_streak >= MAX_PREFILL_STEPS:
        step.decode()
        return
    step.prefill()
    step.admit()
    if step.is_idle:
        step.decode()


def prefill_first_charge_cached(step: StepActions) -> None:
    """As prefill_first, but cached tokens use up budget too, and decodes beyond it are deferred."""
    if not (step.num_decoding and step.prefill_streak >= MAX_PREFILL_STEPS):
        step.prefill()
        step.admit(charge_cached=True)
    if step.is_idle:
        step.decode(at_most=step.tokens_left)


def static(step: StepActions) -> None:
    """Static batching: fill a batch, finish all of it, fill the next."""
    step.prefill()
    if not step.num_decoding or step.prefill_streak:
        step.admit()
    if step.is_idle:
        step.decode()


# chunk: tokens of a prompt to compute now, given (tokens wanted, tokens left, first of its step)


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

        def fits(count: int) -> bool:
            with_chunk = work.with_chunk(start, start + count, is_last=True)
            return costs.seconds(*with_chunk) <= self.seconds

        low, high = 0, want
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low


# victim: a key; the largest is preempted first


def newest(request: Request, view: SchedulerView) -> Any:
    """Last in, first out."""
    return request.history.admission


def least_work(request: Request, view: SchedulerView) -> Any:
    """Fewest tokens computed so far."""
    return -request.num_computed, request.history.serial


def fewest_generated(request: Request, view: SchedulerView) -> Any:
    """Fewest output tokens so far; among equals, the latest arrival."""
    return -request.num_generated, request.history.serial


def lowest_priority(request: Request, view: SchedulerView) -> Any:
    """The largest priority number; among equals, the latest arrival."""
    return request.params.priority, request.history.serial


def fewest_private_blocks(request: Request, view: SchedulerView) -> Any:
    """The request whose preemption frees the fewest blocks."""
    return -view.num_private_blocks(request), request.history.serial


def served_last(request: Request, view: SchedulerView) -> Any:
    """The request that the queue would serve last."""
    return view.queue_key(request)


# swap: whether to keep the victim's computed tokens on the host


def recompute(request: Request, view: SchedulerView) -> bool:
    """Drop the victim's KV blocks; prompt and output are computed again."""
    return False


def swap(request: Request, view: SchedulerView) -> bool:
    """Copy the victim's KV blocks to the host, as long as it has free blocks."""
    return True


def discard_output(request: Request, view: SchedulerView) -> Literal["discard"]:
    """Drop KV blocks and output; the output is generated again. At most 8 times per request."""
    return "discard"


@dataclass(frozen=True)
class swap_if_cheaper(Checked):
    """Swap if copying out and in takes less time than recomputing. All costs are in seconds.

    The defaults are for a 70B model over PCIe 4: 2,048 tokens take 2 ms to copy one way, or 50 ms
    to compute.
    """

    copy: float = number(1e-6, 0)  # one token, one way
    compute: float = number(2.4e-5, 0)  # one token
    start: float = number(1e-4, 0)  # per copy, whatever its size
    pair: float = number(0.0, 0)  # one token, per token before it: attention

    def __call__(self, request: Request, view: SchedulerView) -> bool:
        swap, recompute = self.seconds(request, view)
        return swap < recompute

    def seconds(self, request: Request, view: SchedulerView) -> tuple[float, float]:
        """Estimated time to swap out and in, and to recompute."""
        private = view.num_private_blocks(request) * view.block_size
        tokens = min(private, request.num_computed)
        num_before = request.num_computed - tokens / 2  # shared tokens come first
        again = (self.compute + self.pair * num_before) * tokens
        return 2 * (self.start + self.copy * tokens), again
