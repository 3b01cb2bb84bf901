"""How attention of decodes is cut into programs. Knows lengths and counts, no kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.model.kernels.launch import ceil_div, power_of_2

MANY = 1000  # programs that need no sharing to keep the device busy until most are done
SHARE = 512  # positions for a program, where many programs are shared all the same
BUSY = 140  # programs that still keep the device busy
WORTH = 1000  # positions by which the longest must be ahead before sharing saves more than it costs


class Cut(NamedTuple):
    """How the work is cut: programs that share a sequence at most, and what each of them takes."""

    parts: int
    least: int  # positions for a program, unless the sequence has fewer; whole tiles
    tile: int  # positions at a time
    warps: int
    stages: int


def are_uneven(num_programs: int, lengths: npt.NDArray[np.int64], num_kv_heads: int) -> bool:
    """Whether of many programs, one for each sequence and head, a few would be left over.

    All of them advance alike. So when too few are left to keep the device busy, each has yet to
    read what it is longer than the last one that ended.
    """
    if num_programs < MANY or len(lengths) <= (count := -(-BUSY // num_kv_heads)):
        return False
    return bool(lengths.max() - np.partition(lengths, -count)[-count] > WORTH)


def cut_for(num_programs: int, is_uneven: bool, room: int, row_bytes: int) -> Cut:
    """For so many programs if none were shared, and sequences of up to `room` positions.

    Found by trying on an H200.

    Many: one for each sequence, longest first, unless all would wait for the longest.
    Few: as many as fill the device, but none with next to nothing to do.
    """
    depth = max(1, row_bytes // 256)  # wide rows need fewer on their way
    if num_programs >= MANY:
        return Cut(8 if is_uneven else 1, SHARE, 16, 1, max(2, 4 // depth))
    least = 128 if num_programs > 32 else 64
    wanted = max(4, min(1056 // num_programs, 64))
    parts = power_of_2(min(wanted, ceil_div(room, least)))
    if num_programs > 32:
        return Cut(parts, least, 16, 1, max(2, 4 // depth))
    return Cut(parts, least, max(16, 64 // depth), 4, 2)
