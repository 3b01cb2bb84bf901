"""The lowest point of a function of a few numbers, found without derivatives (Nelder and Mead).

A simplex of one point more than there are dimensions walks downhill: its worst corner is thrown
over the others, further where that pays, back towards them where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

Point = npt.NDArray[np.float64]
Function = Callable[[Point], float]
MAX_STEPS = 400
CLOSE = 1e-7  # between the values of all corners: the walk is over
STRIDE = 0.7  # from a start to the other corners


def lowest(function: Function, starts: Iterable[Point]) -> Point:
    """The best point that walks from these starts reach."""
    reached = [walk(function, start) for start in starts]
    best = min(reached, key=function)
    return walk(function, best)  # with a new simplex: one may collapse before it arrives


def walk(function: Function, start: Point) -> Point:
    """Downhill from one start."""
    corners = np.vstack([start, start + STRIDE * np.eye(len(start))])
    values = np.array([function(corner) for corner in corners])
    for _ in range(MAX_STEPS):
        order = np.argsort(values)
        corners, values = corners[order], values[order]
        if values[-1] - values[0] < CLOSE:
            break
        _move(function, corners, values)
    return np.array(corners[np.argmin(values)])


def _move(function: Function, corners: Point, values: Point) -> None:
    """Replace the last corner, the worst, or draw all towards the first; in place."""
    middle = corners[:-1].mean(axis=0)
    thrown = 2 * middle - corners[-1]
    value = function(thrown)
    if value < values[0]:
        further = 3 * middle - 2 * corners[-1]
        beyond = function(further)
        corners[-1], values[-1] = (further, beyond) if beyond < value else (thrown, value)
    elif value < values[-2]:
        corners[-1], values[-1] = thrown, value
    else:
        near = (middle + (thrown if value < values[-1] else corners[-1])) / 2
        closer = function(near)
        if closer < min(value, values[-1]):
            corners[-1], values[-1] = near, closer
        else:
            corners[1:] = (corners[1:] + corners[0]) / 2
            values[1:] = [function(corner) for corner in corners[1:]]
