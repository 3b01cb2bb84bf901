"""Nelder and Mead's search for the minimum of a function, which needs no derivatives.

A simplex of one point more than there are dimensions moves downhill: its worst corner is reflected
through the others, further if that improves it, back towards them if not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Loss = Callable[[Numbers], float]
MAX_MOVES = 400
NUM_FIRST_MOVES = 60  # from every start, before all but the best are given up
NUM_KEPT = 2  # starts
CLOSE = 1e-7  # difference of the corners' values at which the search ends
STRIDE = 0.7  # from the start to the other corners


def minimize(function: Loss, starts: list[Numbers]) -> Numbers:
    """The lowest point found from these starts."""
    if len(starts) > NUM_KEPT:
        found = (_descend(function, start, NUM_FIRST_MOVES) for start in starts)
        starts = sorted(found, key=function)[:NUM_KEPT]
    best = min((_descend(function, start) for start in starts), key=function)
    return _descend(function, best)  # with a new simplex: the first may collapse before it arrives


def _descend(function: Loss, start: Numbers, max_moves: int = MAX_MOVES) -> Numbers:
    corners = np.vstack([start, start + STRIDE * np.eye(len(start))])
    values = np.array([function(corner) for corner in corners])
    for _ in range(max_moves):
        order = values.argsort()
        corners, values = corners[order], values[order]
        if values[-1] - values[0] < CLOSE:
            break
        _move(function, corners, values)
    return np.array(corners[np.argmin(values)])


def _move(function: Loss, corners: Numbers, values: Numbers) -> None:
    """Replace the last corner, the worst one, or shrink all towards the first; in place."""
    middle = np.add.reduce(corners[:-1]) / (len(corners) - 1)  # half the time of `mean`
    reflected = 2 * middle - corners[-1]
    value = function(reflected)
    if value < values[0]:
        further = 3 * middle - 2 * corners[-1]
        beyond = function(further)
        corners[-1], values[-1] = (further, beyond) if beyond < value else (reflected, value)
    elif value < values[-2]:
        corners[-1], values[-1] = reflected, value
    else:
        near = (middle + (reflected if value < values[-1] else corners[-1])) / 2
        closer = function(near)
        if closer < min(value, values[-1]):
            corners[-1], values[-1] = near, closer
        else:
            corners[1:] = (corners[1:] + corners[0]) / 2
            values[1:] = [function(corner) for corner in corners[1:]]
