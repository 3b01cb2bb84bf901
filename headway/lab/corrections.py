"""Corrections of the cost model by the number of rows of a decode pass.

Kernels compute in tiles, so that 65 rows may take as long as 96, and change their method with the
number of rows. A formula with one rate for all sizes is off by several percent at some of them. A
correction is the measured time over the formula's at some number of rows; between two of them it is
interpolated, on a logarithmic scale of rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Corrections = tuple[tuple[float, float], ...]  # rows, and the factor
# A power of two and a quarter more: the first is a tile that is full, the second a new one.
ROWS = np.array([size * part for size in 2.0 ** np.arange(18) for part in (1, 1.25)])
MIN_NEAR = 5  # passes close to a number of rows
NEAR = 0.3  # of the distance between two numbers
MOST = 2.0  # a correction is at most this factor, or at least its inverse
NUM_ROUNDS = 3  # neighbours share passes, so that each changes the other's median


def factors(corrections: Corrections, rows: npt.ArrayLike) -> Numbers:
    """The correction at these numbers of rows."""
    if not corrections:
        return np.ones(np.shape(rows))
    sizes, values = np.array(corrections).T
    found = np.interp(np.log2(np.maximum(rows, 1)), np.log2(sizes), np.log(values))
    return np.asarray(np.exp(found), dtype=np.float64)


def fit_corrections(rows: Numbers, ratios: Numbers) -> Corrections:
    """Corrections from the rows of passes, and the measured time over the formula's of each."""
    places = np.interp(np.log2(np.maximum(rows, 1)), np.log2(ROWS), np.arange(len(ROWS)))
    weights = np.maximum(0, 1 - np.abs(places - np.arange(len(ROWS))[:, None]))
    known = np.flatnonzero((weights > NEAR).sum(axis=1) >= MIN_NEAR)
    rest, logs = np.log(ratios), np.zeros(len(ROWS))
    for _ in range(NUM_ROUNDS):
        left = rest - np.interp(places, known, logs[known]) if len(known) else rest
        logs[known] += [_median(left, weights[place]) for place in known]
    logs = np.clip(logs, -np.log(MOST), np.log(MOST))
    return tuple((float(ROWS[place]), float(np.exp(logs[place]))) for place in known)


def _median(values: Numbers, weights: Numbers) -> float:
    """The value with half of the weight on each side."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])
