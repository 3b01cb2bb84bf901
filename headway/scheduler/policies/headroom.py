"""Headroom rules: the blocks that an admission must leave free.

`future_peak` looks ahead to the most blocks that the batch will hold at any later step. As long as
no request ends, all of them grow, so block use peaks just before one of the requests ends. If that
peak fits, no request will be preempted. The estimate `limit` assumes that every request reaches its
limit, and `learned` uses the outputs that have finished so far (lengths.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.checks import Checked, number, policy
from headway.config import Headroom, HeadroomRule, SchedulerView
from headway.request import Request
from headway.scheduler.policies.lengths import going_on, is_open_ended, survival_curve

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
NUM_EXACT = 8  # steps near the peak that are counted block by block
MOMENTS = np.linspace(0.0, 1.0, 32)[:, None]  # at which the expected peak is computed
PRESSURE_DEVIATIONS = 0.5  # per recent preemption, for open-ended requests
MIN_CHANCE = 0.5  # ignore moments that an open-ended new request reaches with a lower chance
PRIOR = (np.arange(16) + 0.5) / 16  # shares of the allowed output, before any request finished


@dataclass(frozen=True)
class watermark(Checked):
    """A fixed share of all blocks."""

    share: float = number(0.01, 0, 1)

    def __call__(self, request: Request, view: SchedulerView) -> int:
        return int(self.share * view.num_blocks)


@dataclass(frozen=True)
class reserve_outputs(Checked):
    """Blocks for this share of the output that the batch and the new request may still generate."""

    ratio: float = number(1.0, 0)

    def __call__(self, request: Request, view: SchedulerView) -> int:
        left = [r.limit - 1 - max(r.num_computed, r.prefill_end) for r in view.running]
        left.append(request.limit - 1 - request.num_known)  # the last sampled token is never stored
        return math.ceil(self.ratio * sum(-(-num // view.block_size) for num in left))


@dataclass(frozen=True)
class back_off(Checked):
    """The headroom of `base`, plus `share` of all blocks for every recent preemption."""

    base: HeadroomRule = policy(watermark())
    share: float = number(0.01, 0, 1)

    def __call__(self, request: Request, view: SchedulerView) -> Headroom:
        base = self.base(request, view)
        headroom = Headroom(base + int(self.share * view.num_blocks * view.pressure))
        headroom.base = base
        return headroom


@dataclass(frozen=True)
class Forecast:
    """The running requests and, last, the new one; numbers of tokens, one per request."""

    requests: list[Request]
    held: Floats  # in the cache once the known tokens are computed
    prompt: Floats
    left: Floats  # that may still be stored; the last sampled token never is
    allowed: Floats  # output


# Blocks that the batch will need beyond what it holds now.
Estimate = Callable[[Forecast, SchedulerView], int]


@dataclass(frozen=True)
class future_peak(Checked):
    """The blocks that the batch will need at its peak, beyond what it holds now."""

    estimate: Estimate | None = policy(None)  # None: limit
    margin: float = number(0.0, 0, 1)  # share of all blocks to keep free in addition

    def __call__(self, request: Request, view: SchedulerView) -> int:
        requests = [*view.running, request]
        most = sum([r.limit - r.prefill_end for r in requests]) // view.block_size + len(requests)
        margin = int(self.margin * view.num_blocks)
        if most + margin <= view.num_free:  # even the upper bound fits
            return most + margin - -(-request.num_known // view.block_size)
        rows = [(max(r.num_computed, r.prefill_end), r.num_prompt, r.limit) for r in requests]
        rows[-1] = (request.num_known, request.num_prompt, request.limit)
        held, prompt, limits = np.array(rows, dtype=np.float64).T
        batch = Forecast(requests, held, prompt, limits - 1 - held, limits - prompt)
        return (self.estimate or limit)(batch, view) + margin


def limit(batch: Forecast, view: SchedulerView) -> int:
    """All requests reach their limit: exact for known lengths, cautious for unknown ones."""
    early, late = _delays(batch.requests, view)
    order = np.argsort(-(batch.left + late), kind="stable")  # the last to end comes first
    shared = _shared([batch.requests[i] for i in order], view)
    held, left, early, ends = (a[order] for a in (batch.held, batch.left, early, batch.left + late))
    size = view.block_size
    tokens = np.cumsum(held - shared * size) + ends * np.arange(1, len(held) + 1)
    peak = now = (np.ceil(held / size) - shared).sum()
    for i in np.argsort(tokens)[-NUM_EXACT:]:
        grown = np.minimum(left, np.maximum(ends[i] - early, 0.0))[: i + 1]
        peak = max(peak, (np.ceil((held[: i + 1] + grown) / size) - shared[: i + 1]).sum())
    return int(peak - now)


@dataclass(frozen=True)
class learned(Checked):
    """Outputs with stop tokens end like those seen so far; the others reach their limit.

    Keeps `deviations` standard deviations above the expected peak free. For open-ended requests,
    whose lengths are learned in tokens, it is `open_deviations`, plus half a deviation per recent
    preemption.
    """

    deviations: float = number(2.5, 0)
    open_deviations: float = number(1.0, 0)

    def __call__(self, batch: Forecast, view: SchedulerView) -> int:
        goes_on = np.array([not request.stops for request in batch.requests])
        if goes_on.all():
            return limit(batch, view)
        is_open = np.array([is_open_ended(request) for request in batch.requests]) & ~goes_on
        moments = batch.left.max() * (MOMENTS**2 if is_open.any() else MOMENTS)
        chance, error = _chances(batch, is_open, moments, view)
        alive = np.where(goes_on, 1.0, chance) * (moments <= batch.left)
        order = np.argsort(-batch.left, kind="stable")
        shared = np.zeros(len(order))
        shared[order] = _shared([batch.requests[i] for i in order], view)
        blocks = (batch.held + moments) / view.block_size + 0.5 - shared
        expected, variance = alive * blocks, alive * (1 - alive) * blocks**2
        peaks = expected.sum(axis=1) + self._margins(expected, variance, error, is_open, view)
        if is_open[-1]:  # later it has probably ended and holds no blocks
            peaks = peaks[chance[:, -1] >= MIN_CHANCE]
        return max(0, int(peaks.max() - (np.ceil(batch.held / view.block_size) - shared).sum()))

    def _margins(
        self, expected: Floats, variance: Floats, error: Floats, is_open: Bools, view: SchedulerView
    ) -> Floats:
        """Blocks above the expected number at each moment; errors of open-ended requests add up."""
        if not is_open.any():
            return self.deviations * np.sqrt(variance.sum(axis=1))  # type: ignore[no-any-return]
        bounded = self.deviations**2 * (variance * ~is_open).sum(axis=1)
        spread = (variance * is_open).sum(axis=1) + (expected * error).sum(axis=1) ** 2
        deviations = self.open_deviations + PRESSURE_DEVIATIONS * view.pressure
        return np.sqrt(bounded + deviations**2 * spread)  # type: ignore[no-any-return]


def _chances(
    batch: Forecast, is_open: Bools, moments: Floats, view: SchedulerView
) -> tuple[Floats, Floats]:
    """The chance of each output to reach each moment, and its relative error where known.

    It comes from shares of the allowed output, and for open-ended requests from lengths in tokens.
    """
    error = np.zeros((len(moments), len(is_open)))
    chance = error.copy() if is_open.all() else _chance_by_share(batch, moments, view)
    if is_open.any():
        reached = np.maximum(batch.held - batch.prompt, 0.0)[is_open]
        curve = survival_curve(np.asarray(view.output_lengths, dtype=np.float64), reached)
        chance[:, is_open], error[:, is_open] = going_on(curve, reached, moments)
    return chance, error


def _chance_by_share(batch: Forecast, moments: Floats, view: SchedulerView) -> Floats:
    """The chances, from shares of the allowed output."""
    seen = np.sort(np.concatenate([PRIOR, np.asarray(view.output_shares)]))
    generated = np.maximum(batch.held - batch.prompt, 0.0) / batch.allowed
    num_longer = len(seen) - np.searchsorted(seen, generated, side="right")
    outlived = np.searchsorted(seen, generated + moments / batch.allowed, side="right")
    chance: Floats = (len(seen) - outlived) / np.maximum(num_longer, 1)
    return chance


def _delays(requests: list[Request], view: SchedulerView) -> tuple[Floats, Floats]:
    """Steps until each prompt is computed: at the earliest, and at the latest."""
    todo = np.array([max(0, r.prefill_end - r.num_computed) for r in requests], dtype=np.float64)
    todo[-1] = max(0, view.num_uncached(requests[-1]) - view.tokens_left)
    # All other requests may decode by then.
    rate = max(1, view.max_num_batched_tokens - len(requests))
    if todo[:-1].any() and len(view.service()) > 1:  # fair queueing: others may overtake a prompt
        return np.zeros(len(todo)), np.where(todo > 0, np.ceil(todo.sum() / rate), 0.0)
    late: Floats = np.where(todo > 0, np.ceil(np.cumsum(todo) / rate), 0.0)
    return np.where(todo > 0, 1.0, 0.0), late


def _shared(requests: list[Request], view: SchedulerView) -> Floats:
    """For each request, the number of its blocks shared with a request that ends later."""
    shared, blocks = np.zeros(len(requests)), [view.blocks_of(r) for r in requests]
    if sum(map(len, blocks)) > view.num_blocks - view.num_free:  # else no block is shared
        seen: set[int] = set()
        for place, own in enumerate(blocks):
            num_seen = len(seen)
            seen.update(own)
            shared[place] = len(own) - (len(seen) - num_seen)
    return shared
