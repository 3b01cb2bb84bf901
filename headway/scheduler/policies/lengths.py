"""What the scheduler learns from finished outputs, for headroom rules that look ahead.

A request without `max_tokens` may run to max_model_len, so its limit says little about its output.
For such open-ended requests this file estimates a survival curve: the chance that an output reaches
a length. Lengths fall into bins of equal ratio, four per doubling. The chance to end in a bin is the
number of outputs that ended in it over the number that entered it. Running requests count in every
bin that they have passed, so long outputs are learned before the first of them ends. The prior
counts as `PRIOR_WEIGHT` outputs in every bin.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from headway.request import Request

Floats = npt.NDArray[np.float64]
OPEN_ENDED = 2048  # tokens; a request that allows more is open-ended even with max_tokens
PER_DOUBLING = 4
NUM_BINS = 21 * PER_DOUBLING  # up to 2 million tokens
EDGES = 2.0 ** (np.arange(NUM_BINS + 1) / PER_DOUBLING) - 1  # tokens; bin k is [k, k + 1)
PRIOR_MEDIAN = 256  # tokens
PRIOR_WEIGHT = 4.0  # outputs
# One output in 17 is longer than 4 medians, one in 257 longer than 16: a heavy tail.
PRIOR_SURVIVAL = 1 / (1 + (EDGES / PRIOR_MEDIAN) ** 2)
PRIOR_ENDS = PRIOR_WEIGHT * (1 - PRIOR_SURVIVAL[1:] / PRIOR_SURVIVAL[:-1])
NUM_REMEMBERED = 256  # finished outputs of each kind
DECAY = 0.97  # of `pressure` per step: a preemption counts half after 23 steps


def is_open_ended(request: Request) -> bool:
    """Whether the limit of a request says little about the length of its output."""
    params = request.params
    is_unbounded = params.max_tokens is None and params.max_total_tokens is None
    return is_unbounded or request.limit - request.num_prompt > OPEN_ENDED


class OutputStatistics:
    """Finished outputs and recent preemptions."""

    def __init__(self) -> None:
        self.shares: deque[float] = deque(maxlen=NUM_REMEMBERED)  # generated / allowed
        self.lengths: deque[int] = deque(maxlen=NUM_REMEMBERED)  # of open-ended requests
        self.pressure = 0.0  # recent preemptions

    def record(self, request: Request) -> None:
        """Remember a finished output: its length if open-ended, else its share of the allowed."""
        if not is_open_ended(request):
            self.shares.append(request.num_generated / (request.limit - request.num_prompt))
        elif request.stops:
            self.lengths.append(request.num_generated)

    def decay(self) -> None:
        self.pressure *= DECAY


def going_on(curve: Floats, reached: Floats, further: Floats) -> tuple[Floats, Floats]:
    """Chance that outputs of `reached` tokens grow by `further`, and its relative error."""
    hazard, variance = _at(curve, reached + further) - _at(curve, reached)[:, None]
    return np.exp(-hazard), np.sqrt(np.minimum(variance, 1.0))


def _at(curve: Floats, lengths: Floats) -> Floats:
    """Both sums of a curve at these lengths; linear interpolation."""
    places = _bin(lengths)
    whole = places.astype(np.intp)
    steps = np.diff(curve).take(whole, axis=1)  # take: faster than an index here
    sums: Floats = curve.take(whole, axis=1) + (places - whole) * steps
    return sums


def survival_curve(finished: Floats, running: Floats) -> Floats:
    """The chance that an output reaches a length, as two sums over the bins below each edge.

    From the lengths of finished outputs and those that running ones have reached. Row 0 is -log of
    the chance, row 1 the relative variance of its estimate (Greenwood's formula).
    """
    ends = np.bincount(_bin(finished).astype(np.intp), minlength=NUM_BINS)
    entered = ends[::-1].cumsum()[::-1] + _passed(_bin(running)) + PRIOR_WEIGHT
    chance = (ends + PRIOR_ENDS) / entered
    sums = np.zeros((2, NUM_BINS + 1))
    np.cumsum(-np.log1p(-chance), out=sums[0, 1:])
    np.cumsum(chance / ((1 - chance) * (entered + 1)), out=sums[1, 1:])
    return sums


def _bin(lengths: Floats) -> Floats:
    """The bin of each length; the fraction says how far inside the bin it is."""
    places: Floats = np.minimum(np.log2(lengths + 1) * PER_DOUBLING, NUM_BINS - 1e-6)
    return places


def _passed(places: Floats) -> Floats:
    """Running outputs that have passed each bin; the bin of an output counts as its fraction."""
    whole = places.astype(np.intp)
    inside = np.bincount(whole, weights=places - whole, minlength=NUM_BINS)
    num_later = np.bincount(whole, minlength=NUM_BINS)[::-1].cumsum()[::-1]
    passed: Floats = inside + np.append(num_later[1:], 0)
    return passed
