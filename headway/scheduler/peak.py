"""The headroom that looks ahead: the most blocks the batch will hold at once, from who ends when.

Just before a request ends, everybody who ends later has grown by as many tokens as it had left;
the batch holds most at one of these moments. If the most fits, nobody will be preempted, as far as
the estimate of the outputs is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.config import World
from headway.request import Request

Floats = npt.NDArray[np.float64]
Estimate = Callable[[Floats, Floats, Sequence[float]], Floats]  # (generated, allowed, seen)
FEWEST_SHARES = 16  # requests that must have ended before their outputs tell anything
CLOSEST = 8  # moments near the peak that are counted block by block


def limit(generated: Floats, allowed: Floats, shares: Sequence[float]) -> Floats:
    """Everybody goes on to its limit: right for known lengths, cautious for unknown ones."""
    return allowed


@dataclass(frozen=True)
class learned:
    """Outputs end like those seen so far: this quantile of them, among those that got as far."""

    quantile: float = 0.5

    def __call__(self, generated: Floats, allowed: Floats, shares: Sequence[float]) -> Floats:
        if len(shares) < FEWEST_SHARES:
            return allowed
        seen = np.sort(np.asarray(shares))
        first = np.searchsorted(seen, generated / allowed, side="right")
        place = first + self.quantile * (len(seen) - first)
        typical = seen[np.minimum(place.astype(int), len(seen) - 1)] * allowed
        # Whoever outlived everything seen so far is taken to be about to end.
        estimate: Floats = np.minimum(np.maximum(typical, generated + 1), allowed)
        return estimate


@dataclass(frozen=True)
class future_peak:
    """What the batch will take beyond what it holds now, at its fullest moment to come."""

    estimate: Estimate = limit
    margin: float = 0.0  # share of all blocks kept free on top

    def __call__(self, request: Request, world: World) -> int:
        batch = [*world.running, request]
        rows = [(max(r.num_computed, r.prefill_end), r.num_prompt, r.limit) for r in batch]
        rows[-1] = (request.num_known, request.num_prompt, request.limit)
        held, prompt, limits = np.array(rows, dtype=np.float64).T
        generated = np.maximum(held - prompt, 0.0)
        outputs = self.estimate(generated, limits - prompt, world.output_shares)
        left = np.maximum(prompt + outputs - 1 - held, 0.0)
        early, late = _delays(batch, world)
        order = np.argsort(-(left + late), kind="stable")
        shared = _shared([batch[i] for i in order], held[order], world)
        growth = _growth(held[order], left[order], early[order], late[order], shared, world)
        return growth + int(self.margin * world.num_blocks)


def _delays(batch: list[Request], world: World) -> tuple[Floats, Floats]:
    """Steps until each prompt is computed, at the earliest and at the latest."""
    todo = np.array([max(0, r.prefill_end - r.num_computed) for r in batch], dtype=np.float64)
    todo[-1] = max(0, world.num_uncached(batch[-1]) - world.tokens_left)
    rate = max(1, world.max_tokens - len(batch))  # the others may all decode by then
    late: Floats = np.where(todo > 0, np.ceil(np.cumsum(todo) / rate), 0.0)
    return np.where(todo > 0, 1.0, 0.0), late


def _shared(batch: list[Request], held: Floats, world: World) -> Floats:
    """Blocks of each request that one ending later holds too; they outlive it."""
    shared, num_blocks = np.zeros(len(batch)), np.ceil(held / world.block_size)
    blocks = [world.blocks_of(r) for r in batch]
    if sum(map(len, blocks)) == world.num_blocks - world.num_free:
        return shared  # nobody shares anything
    seen: set[int] = set()
    for place, own in enumerate(blocks):
        num_seen = len(seen)
        seen.update(own)
        shared[place] = len(own) - (len(seen) - num_seen)
    return np.minimum(shared, num_blocks)


def _growth(
    held: Floats, left: Floats, early: Floats, late: Floats, shared: Floats, world: World
) -> int:
    """Blocks more than now at the fullest moment; rows sorted by their end, latest first."""
    size, ends = world.block_size, left + late
    tokens = np.cumsum(held - shared * size) + ends * np.arange(1, len(held) + 1)
    now = (np.ceil(held / size) - shared).sum()
    peak = now
    for i in np.argsort(tokens)[-CLOSEST:]:
        grown = np.minimum(left, np.maximum(ends[i] - early, 0.0))[: i + 1]
        peak = max(peak, (np.ceil((held[: i + 1] + grown) / size) - shared[: i + 1]).sum())
    return int(peak - now)
