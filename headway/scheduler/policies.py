"""Ready-made functions for five of the six slots; the queue's are in queues.py.

A policy without a number is a function. One with numbers is a frozen dataclass that can be called,
so that it compares, prints itself as it is written on the command line, and keeps no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.config import Checked, HeadroomRule, SchedulerView, StepActions, count, number
from headway.errors import ConfigError
from headway.request import Request

# recipe: which verbs, in which order


def mixed(step: StepActions) -> None:
    """Decodes first, then cut prompts, then newcomers, all in one batch."""
    step.decode()
    step.prefill()
    step.admit()


def swapped_first(step: StepActions) -> None:
    """As mixed, but who was swapped out is brought back before anything else."""
    step.admit_swapped()
    mixed(step)


MAX_PREFILL_STEPS = 16  # in a row, while somebody waits for its next token


def prefill_first(step: StepActions) -> None:
    """All prompts or all decodes, prompts first; decodes get a turn after 16 prompt steps."""
    if step.num_decoding and step.prefill_streak >= MAX_PREFILL_STEPS:
        step.decode()
        return
    step.prefill()
    step.admit()
    if step.is_idle:
        step.decode()


def charged_in_full(step: StepActions) -> None:
    """As prefill_first, but cached tokens cost budget too, and decodes wait when it runs out."""
    if not (step.num_decoding and step.prefill_streak >= MAX_PREFILL_STEPS):
        step.prefill()
        step.admit(charge_cached=True)
    if step.is_idle:
        step.decode(at_most=step.tokens_left)


charged_in_full.defers = True  # type: ignore[attr-defined]  # a budget below the seats is fine


def static(step: StepActions) -> None:
    """Fill a batch, drain it completely, fill the next."""
    step.prefill()
    if not step.num_decoding or step.prefill_streak:
        step.admit()
    if step.is_idle:
        step.decode()


# chunk: how much of a prompt now, given (tokens wanted, tokens left, first of its step)


def whole(want: int, left: int, is_first: bool) -> int:
    """All of it or nothing."""
    return want if want <= left else 0


def split_first(want: int, left: int, is_first: bool) -> int:
    """Cut only the first prompt of a step."""
    return min(want, left) if is_first or want <= left else 0


def split_any(want: int, left: int, is_first: bool) -> int:
    """Cut whatever does not fit."""
    return min(want, left)


@dataclass(frozen=True)
class at_most(Checked):
    """Cut, and never more than `tokens` of one prompt in a step."""

    tokens: int = count(512, 1)

    def __call__(self, want: int, left: int, is_first: bool) -> int:
        return min(want, left, self.tokens)


# headroom: blocks an admission must leave free


@dataclass(frozen=True)
class watermark(Checked):
    """A fixed share of all blocks."""

    share: float = number(0.01, 0, 1)

    def __call__(self, request: Request, view: SchedulerView) -> int:
        return int(self.share * view.num_blocks)


def _num_left(request: Request) -> int:
    """Tokens a request may still store; the last one sampled never is."""
    if request.row < 0:
        return request.limit - 1 - request.num_known
    return request.limit - 1 - max(request.num_computed, request.prefill_end)


@dataclass(frozen=True)
class reserve_outputs(Checked):
    """Enough for this share of all the output that the batch and the newcomer may still make."""

    ratio: float = number(1.0, 0)

    def __call__(self, request: Request, view: SchedulerView) -> int:
        size = view.block_size
        batch = sum(-(-_num_left(r) // size) for r in (*view.running, request))
        return math.ceil(self.ratio * batch)


@dataclass(frozen=True)
class back_off(Checked):
    """What `base` asks, and `share` of all blocks more for every recent preemption."""

    base: HeadroomRule = watermark()
    share: float = number(0.01, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.base):
            raise ConfigError(f"back_off: base must be a headroom rule, not {self.base!r}")

    def __call__(self, request: Request, view: SchedulerView) -> int:
        return self.base(request, view) + int(self.share * view.num_blocks * view.pressure)


# victim: a key; the largest is preempted first


def newest(request: Request, view: SchedulerView) -> Any:
    """Last in, first out."""
    return request.history.admission


def least_work(request: Request, view: SchedulerView) -> Any:
    """Fewest tokens computed so far."""
    return -request.num_computed, request.history.serial


def lowest_priority(request: Request, view: SchedulerView) -> Any:
    """The largest priority number; among equals the latest arrival."""
    return request.params.priority, request.history.serial


def fewest_lost(request: Request, view: SchedulerView) -> Any:
    """Fewest tokens that nobody else keeps in the cache."""
    return -view.num_private_blocks(request), request.history.serial


def served_last(request: Request, view: SchedulerView) -> Any:
    """Whoever the queue would serve last."""
    return view.place(request)


# swap: keep the victim's work on the host?


def recompute(request: Request, view: SchedulerView) -> bool:
    """Drop it; the prompt and all that was generated are computed again."""
    return False


def swap(request: Request, view: SchedulerView) -> bool:
    """Copy it out, as long as the host has room."""
    return True


@dataclass(frozen=True)
class cheaper(Checked):
    """Swap if copying out and in takes less time than computing again. Seconds.

    The defaults are of a 70B model over PCIe 4: 2,048 tokens in 2 ms one way, or in 50 ms computed.
    """

    copy: float = number(1e-6, 0)  # one token, one way
    compute: float = number(2.4e-5, 0)  # one token
    start: float = number(1e-4, 0)  # a copy, whatever its size
    pair: float = number(0.0, 0)  # one token, for each that is before it: attention

    def __call__(self, request: Request, view: SchedulerView) -> bool:
        private = view.num_private_blocks(request) * view.block_size
        tokens = min(private, request.num_computed)
        num_before = request.num_computed - tokens / 2  # what others hold comes first
        again = (self.compute + self.pair * num_before) * tokens
        return 2 * (self.start + self.copy * tokens) < again
