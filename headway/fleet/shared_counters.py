"""The counters of several gateways of one fleet, so that each can report the sums.

They are in a file that all gateways map, with one row for each.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from headway.fleet.settings import FleetCounters

TOTALS = tuple(each.name for each in fields(FleetCounters))
GAUGES = ("num_open", "num_without_replica")
NAMES = TOTALS + GAUGES
Numbers = dict[str, float]


class SharedCounters:
    """Row `number` of the file. A gateway that replaces another one adds to what that has counted."""

    def __init__(self, path: Path, number: int) -> None:
        self._rows = np.memmap(path, np.float64, "r+").reshape(-1, len(NAMES))
        self._own = self._rows[number]
        self._own[len(TOTALS) :] = 0
        self._before = self._own.copy()

    @staticmethod
    def create(path: Path, num_gateways: int) -> None:
        np.zeros((num_gateways, len(NAMES))).tofile(path)

    def sums(self, own: Numbers) -> Numbers:
        """Write this gateway's numbers; returns those of all gateways."""
        self._own[:] = self._before + [own[name] for name in NAMES]
        sums = self._rows.sum(axis=0)
        return {name: type(own[name])(each) for name, each in zip(NAMES, sums, strict=True)}
