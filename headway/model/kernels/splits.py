"""How decode attention is split into programs. Knows lengths and counts, but no kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.model.kernels.launch import ceil_div, power_of_2

MANY = 1000  # programs that keep the device busy without splitting sequences
SHARINGS = (1, 4, 8)  # programs per long sequence, if there are at least MANY programs
LONG = 1300  # mean positions per sequence above which four programs per sequence are faster
BUSY = 140  # programs that still keep the device busy
WORTH = 1000  # lead of the longest sequences above which eight programs per sequence are faster


class Cut(NamedTuple):
    """How the work is split: the programs per sequence, and the work of each."""

    parts: int
    least: int  # minimum positions per program, a multiple of `tile`
    tile: int  # positions at a time
    warps: int
    stages: int


def num_splits_of(num_programs: int, lengths: npt.NDArray[np.int64], num_kv_heads: int) -> int:
    """Programs per long sequence, if one program per sequence and head makes many programs.

    All programs on the device advance at the same rate. When too few are left to keep it busy, each
    still has to read its lead over the last one that ended. If they end together, the programs that
    did not fit on the device are left, with all their positions.
    """
    if num_programs < MANY or not len(lengths):
        return 1
    count = -(-BUSY // num_kv_heads)
    if len(lengths) > count and lengths.max() - np.partition(lengths, -count)[-count] > WORTH:
        return 8
    return 4 if lengths.mean() > LONG else 1


def split_for(num_programs: int, sharing: int, room: int, row_bytes: int) -> Cut:
    """The split for `num_programs` (before splitting) and sequences of up to `room` positions.

    Measured on an H200.

    With many programs: one per sequence, longest first, or `sharing` per sequence.
    With few: enough to fill the device, but none with almost nothing to do.
    """
    depth = max(1, row_bytes // 256)  # wide rows need fewer loads in flight
    if num_programs >= MANY:
        least = 64 * sharing  # best of those tried: 256 positions for four programs, 512 for eight
        return Cut(sharing, least, 16, 1, max(2, 4 // depth))
    least = 128 if num_programs > 32 else 64
    wanted = max(4, min(1056 // num_programs, 64))
    parts = power_of_2(min(wanted, ceil_div(room, least)))
    if num_programs > 32:
        return Cut(parts, least, 16, 1, max(2, 4 // depth))
    return Cut(parts, least, max(16, 64 // depth), 4, 2)
