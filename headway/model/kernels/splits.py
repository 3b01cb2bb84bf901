"""How attention of decodes is cut into programs. Knows lengths and counts, no kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.model.kernels.launch import ceil_div, power_of_2

MANY = 1000  # programs that need no sharing to keep the device busy until most are done
SHARINGS = (1, 4, 8)  # programs that share a long sequence, where there are as many as that
LONG = 1300  # positions of a sequence, on average, from which on it pays that four share each
BUSY = 140  # programs that still keep the device busy
WORTH = 1000  # positions by which the longest must be ahead before it pays that eight share it


class Cut(NamedTuple):
    """How the work is cut: programs that share a sequence at most, and what each of them takes."""

    parts: int
    least: int  # positions for a program, unless the sequence has fewer; whole tiles
    tile: int  # positions at a time
    warps: int
    stages: int


def num_splits_of(num_programs: int, lengths: npt.NDArray[np.int64], num_kv_heads: int) -> int:
    """How many programs should share a long sequence, if one for each and every head are many.

    All that fit on the device advance alike. So when too few are left to keep it busy, each has yet
    to read what it is longer than the last one that ended; and if they end together, those that did
    not fit are left, with all that they have to read.
    """
    if num_programs < MANY or not len(lengths):
        return 1
    count = -(-BUSY // num_kv_heads)
    if len(lengths) > count and lengths.max() - np.partition(lengths, -count)[-count] > WORTH:
        return 8
    return 4 if lengths.mean() > LONG else 1


def split_for(num_programs: int, sharing: int, room: int, row_bytes: int) -> Cut:
    """For so many programs if none were shared, and sequences of up to `room` positions.

    Found by trying on an H200.

    Many: one for each sequence, longest first, or as many as `sharing` says.
    Few: as many as fill the device, but none with next to nothing to do.
    """
    depth = max(1, row_bytes // 256)  # wide rows need fewer on their way
    if num_programs >= MANY:
        least = 64 * sharing  # as good as any: 256 positions where four share, 512 where eight do
        return Cut(sharing, least, 16, 1, max(2, 4 // depth))
    least = 128 if num_programs > 32 else 64
    wanted = max(4, min(1056 // num_programs, 64))
    parts = power_of_2(min(wanted, ceil_div(room, least)))
    if num_programs > 32:
        return Cut(parts, least, 16, 1, max(2, 4 // depth))
    return Cut(parts, least, max(16, 64 // depth), 4, 2)
