"""How attention is split into programs. Knows lengths and counts, but no kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.model.kernels.launch import ceil_div, power_of_2

LOG2_E = 1.4426950408889634  # scores are to base 2
MANY = 1000  # programs that keep the device busy without splitting sequences
FEWEST = 8  # programs; up to here each has four warps
FEW = 32  # programs; up to here a sequence is always split as far as it pays
SOME = 96  # programs; up to here also short sequences are split
SPLIT_COUNTS = (1, 4, 8)  # programs per long sequence, if there are at least MANY programs
MIN_SPLITS = 4  # programs per sequence below ENOUGH
ENOUGH = 448  # programs of four warps that keep the device busy with few splits
HALVES = 2  # programs per sequence from ENOUGH to MANY; one program in these two cases:
SHORT = 900  # no sequence has more positions than this
EVEN = 700  # at least as many programs, and no sequence is longer than twice the mean
LEADING = 16  # programs per long sequence below MANY, if few sequences are much longer
LONG = 1300  # mean positions per sequence above which four programs per sequence are faster
BUSY = 140  # programs that still keep the device busy
WORTH = 1000  # lead of the longest sequences above which more programs per sequence are faster
MAX_PREFILL_SPLITS = 8  # programs that share a tile of a prompt's queries
MAX_TILE_ROWS = 128  # of such a tile
SHARED_NUMBERS = 4  # that they store besides the sums; four, so that copies of 16 bytes are aligned


class DecodeSplit(NamedTuple):
    """How the work is split: the programs per sequence, and the work of each."""

    num_splits: int
    min_positions: int  # minimum positions per program, a multiple of `tile`
    tile: int  # positions at a time
    warps: int
    stages: int


def split_counts(num_programs: int) -> tuple[int, ...]:
    """All values that choose_num_splits returns for this number of programs."""
    if num_programs >= MANY:
        return SPLIT_COUNTS
    if num_programs >= ENOUGH:
        return (1, HALVES, LEADING)
    return (1, LEADING) if num_programs > FEW else (1,)


def choose_num_splits(num_programs: int, lengths: npt.NDArray[np.int64], num_kv_heads: int) -> int:
    """Programs per long sequence; 1 means one program, or below ENOUGH the default of split_for.

    All programs on the device advance at the same rate. When too few are left to keep it busy, each
    still has to read its lead over the last one that ended. If they end together, the programs that
    did not fit on the device are left, with all their positions.
    """
    if num_programs <= FEW or not len(lengths):
        return 1
    is_many = num_programs >= MANY
    count = -(-BUSY // (num_kv_heads if is_many else num_kv_heads * MIN_SPLITS))
    longest = lengths.max()
    if len(lengths) > count and longest - np.partition(lengths, -count)[-count] > WORTH:
        return SPLIT_COUNTS[-1] if is_many else LEADING
    if is_many:
        return SPLIT_COUNTS[1] if lengths.mean() > LONG else 1
    is_even = num_programs >= EVEN and longest <= 2 * lengths.mean()
    return 1 if num_programs < ENOUGH or longest <= SHORT or is_even else HALVES


def mixed_num_splits(num_programs: int) -> int:
    """The number of splits in a pass with prompts, which serves all lengths."""
    return split_counts(num_programs)[-1]


def split_for(
    num_programs: int, num_splits: int, max_positions: int, row_bytes: int
) -> DecodeSplit:
    """The split for `num_programs` (before splitting) and sequences of up to `max_positions`.

    Measured on an H200.

    With many programs: one per sequence, longest first, or `num_splits` per sequence.
    With enough: the same, of four warps, unless sequences are split into more than HALVES.
    With few: enough to fill the device, but none with almost nothing to do.
    """
    depth = max(1, row_bytes // 256)  # wide rows need fewer loads in flight
    if num_programs >= MANY:
        min_positions = 64 * num_splits  # 256 for four programs and 512 for eight were best
        return DecodeSplit(num_splits, min_positions, 16, 1, max(2, 4 // depth))
    wide_tile = max(16, 64 // depth)
    if num_programs >= ENOUGH and num_splits <= HALVES:
        return DecodeSplit(num_splits, 128, wide_tile, 4, 2)
    min_positions = 64 if num_programs <= FEW else 32 if num_programs <= SOME else 128
    wanted = max(MIN_SPLITS, num_splits, min(1056 // num_programs, 64))
    num_splits = power_of_2(min(wanted, ceil_div(max_positions, min_positions)))
    if num_programs <= FEWEST:
        return DecodeSplit(num_splits, min_positions, wide_tile, 4, 2)
    return DecodeSplit(num_splits, min_positions, 16, 1, max(2, 4 // depth))


def prefill_splits(num_tiles: int, num_processors: int) -> int:
    """Programs that share a tile of a prompt's queries, if each program fills a multiprocessor.

    All of them run at the same time.
    """
    return max(1, min(num_processors // max(num_tiles, 1), MAX_PREFILL_SPLITS))


def max_shared_rows(num_processors: int) -> int:
    """The maximum of queries, each of a token and a head, that programs share."""
    return num_processors // 2 * MAX_TILE_ROWS
