"""Tiles of queries that several programs share, each over a part of the keys; in Gluon.

For prefill_hopper.py. A program stores what it has found. The last one to arrive at the tile's
counter adds everything up, in the order of the parts, and sets the counter to zero for the next
launch. So short sequences, which are not split, cost no second kernel.

Legend: as in prefill.py; C programs that share a tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MIN_TILES = gl.constexpr(8)  # tiles of keys of a part, at least
# Triton 3.6 and later versions have different names.
wait_for_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def shared_sums(num_rows: int, head_dim: int, counters: Tensor) -> tuple[Tensor, ...]:
    """Room for the sums, maxima and sums of weights of that many (token, head, part)."""
    shapes = ((num_rows, head_dim), (num_rows,), (num_rows,))
    return tuple(torch.empty(each, dtype=torch.float32, device=counters.device) for each in shapes)


@gluon.jit
def part_of(split, num_splits, num_earlier, num_cached, KEYS: gl.constexpr):
    """The number of parts of a sequence's keys, and where part `split` starts and ends.

    All rows see all keys of every part but the last, which is the only one that is masked.
    """
    num_seen, num_tiles = num_earlier // KEYS, gl.cdiv(num_cached, KEYS)
    num_parts = gl.maximum(gl.minimum(num_splits, num_seen // MIN_TILES), 1)
    size = gl.minimum(gl.cdiv(num_tiles, num_parts), num_seen // gl.maximum(num_parts - 1, 1))
    start = split * size * KEYS
    return num_parts, start, gl.where(split < num_parts - 1, start + size * KEYS, num_cached)


@gluon.jit
def joined(mixed, top, total, sums, tops, totals, counter, place, is_row, split, num_parts):
    """The sums of all parts, and whether this program is the last one of the tile.

    `place` is that of part 0 of each row.
    """
    ROWS: gl.constexpr = mixed.shape[0]
    D: gl.constexpr = mixed.shape[1]
    layout: gl.constexpr = mixed.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    d = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(sums + (place + split)[:, None] * D + d, mixed, mask=is_row[:, None])
    gl.store(tops + place + split, top, mask=is_row)
    gl.store(totals + place + split, total, mask=is_row)
    wait_for_threads()  # the counter says that all of them have stored
    is_last = gl.atomic_add(counter, 1) == num_parts - 1
    if is_last:
        gl.store(counter, 0)
        top = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
        total = gl.zeros([ROWS], gl.float32, row_layout)
        mixed = gl.zeros([ROWS, D], gl.float32, layout)
        for part in range(num_parts):
            # Past the first cache: other multiprocessors have written it.
            at = place + part
            next_top = gl.load(tops + at, mask=is_row, other=0.0, cache_modifier=".cg")
            next_total = gl.load(totals + at, mask=is_row, other=0.0, cache_modifier=".cg")
            found = gl.load(
                sums + at[:, None] * D + d, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
            )
            new_top = gl.maximum(top, next_top)
            share, next_share = gl.exp2(top - new_top), gl.exp2(next_top - new_top)
            total = total * share + next_total * next_share
            mixed = mixed * share[:, None] + found * next_share[:, None]
            top = new_top
    return mixed, total, is_last
