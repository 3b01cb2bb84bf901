"""The headroom that looks ahead: the most blocks the batch will hold at once, from who ends when.

Just before a request ends, everybody who ends later has grown by as many tokens as it had left;
the batch holds most at one of these moments. If the most fits, nobody will be preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.config import World
from headway.request import Request

Floats = npt.NDArray[np.float64]
FEWEST_SHARES = 16  # requests that must have ended before their outputs tell anything
CLOSEST = 8  # moments near the peak that are counted block by block


def limit(generated: Floats, allowed: Floats, shares: Sequence[float]) -> Floats:
    """Everybody goes on to its limit: right for known lengths, cautious for unknown ones."""
    return allowed


@dataclass(frozen=True)
class learned:
    """Outputs end like those seen so far: this quantile of them, among those that got as far."""

    quantile: float = 0.6

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


Estimate = Callable[[Floats, Floats, Sequence[float]], Floats]


@dataclass(frozen=True)
class future_peak:
    """What the batch will take beyond what it holds now, at its fullest moment to come."""

    estimate: Estimate = limit
    margin: float = 0.0  # share of all blocks kept free on top

    def __call__(self, request: Request, world: World) -> int:
        rows: list[tuple[int, int, int]] = [
            (
                r.num_computed if r.num_computed > r.prefill_end else r.prefill_end,
                r.num_prompt,
                r.limit,
            )
            for r in world.running
        ]
        rows.append((request.num_known, request.num_prompt, request.limit))
        held, prompt, limits = np.array(rows, dtype=np.float64).T
        allowed = limits - prompt
        outputs = self.estimate(np.maximum(held - prompt, 0.0), allowed, world.output_shares)
        left = np.maximum(prompt + outputs - 1 - held, 0.0)
        size = world.block_size
        now = np.ceil(held / size).sum()
        return int(_peak(held, left, size) - now) + int(self.margin * world.num_blocks)


def _peak(held: Floats, left: Floats, size: int) -> Any:
    """The most blocks held at once, if request i holds held[i] tokens and ends left[i] later."""
    order = np.argsort(-left)
    held, left = held[order], left[order]
    tokens = np.cumsum(held) + left * np.arange(1, len(left) + 1)
    peak = 0.0
    for i in np.argsort(tokens)[-CLOSEST:]:
        peak = max(peak, np.ceil((held[: i + 1] + left[i]) / size).sum())
    return peak
