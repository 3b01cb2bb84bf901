"""Tiles of queries that several programs share, each over a part of the keys; in Gluon.

For prefill_hopper.py. A program stores what it has found. The last one to arrive at the tile's
counter adds everything up, in the order of the parts, and sets the counter to zero for the next
launch. So short sequences, which are not split, cost no second kernel.

Legend: as in prefill.py. A row of the shared sums is that of a token, a head and a part: D sums, the
maximum of the scores, and the sum of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headway.model.kernels.attention.splits import MAX_PREFILL_SPLITS, SHARED_NUMBERS

MIN_TILES = gl.constexpr(8)  # tiles of keys of a part, at least
SPLITS = gl.constexpr(MAX_PREFILL_SPLITS)
PADDING = gl.constexpr(SHARED_NUMBERS)  # numbers of a row after the sums
# Triton 3.6 and later versions have different names.
wait_for_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def shared_sums(num_rows: int, head_dim: int, device: torch.device) -> Tensor:
    """Room for what programs find for `num_rows` queries."""
    shape = (num_rows * MAX_PREFILL_SPLITS, head_dim + SHARED_NUMBERS)
    return torch.empty(shape, dtype=torch.float32, device=device)


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
def store_part(sums, row, is_row, mixed, top, total):
    """Store the sums of a part's rows; `sums` points to this part of row 0."""
    D: gl.constexpr = mixed.shape[1]
    home = sums + row * (SPLITS * (D + PADDING))
    d = gl.arange(0, D, gl.SliceLayout(0, mixed.type.layout))
    gl.store(home[:, None] + d[None, :], mixed, mask=is_row[:, None])
    gl.store(home + D, top, mask=is_row)
    gl.store(home + (D + 1), total, mask=is_row)


@gluon.jit
def join_parts(
    sums, counter, num_parts, out, out_token_stride, out_head_stride, first, num_rows,
    G: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Write the rows of a tile from `first` on to `out`, if all parts of them are stored.

    `sums` points to part 0 of row 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    SIZE: gl.constexpr = ROWS // 2  # rows at a time
    wait_for_threads()  # then the counter says that all of them have stored
    if gl.atomic_add(counter, 1) == num_parts - 1:
        gl.store(counter, 0)
        d = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
        for base in range(0, ROWS, SIZE):
            row = first + base + gl.arange(0, SIZE, gl.SliceLayout(1, layout))
            is_row = row < num_rows
            home = sums + place_of(row, G, GROUP) * (SPLITS * (D + PADDING))
            top = gl.full([SIZE], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
            total = gl.zeros([SIZE], gl.float32, gl.SliceLayout(1, layout))
            mixed = gl.zeros([SIZE, D], gl.float32, layout)
            for _ in range(num_parts):
                # Past the first cache: other multiprocessors have written it.
                next_top = gl.load(home + D, mask=is_row, other=0.0, cache_modifier=".cg")
                weight = gl.load(home + (D + 1), mask=is_row, other=0.0, cache_modifier=".cg")
                found = gl.load(
                    home[:, None] + d, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
                )
                new_top = gl.maximum(top, next_top)
                share, next_share = gl.exp2(top - new_top), gl.exp2(next_top - new_top)
                total = total * share + weight * next_share
                mixed = mixed * share[:, None] + found * next_share[:, None]
                top, home = new_top, home + (D + PADDING)
            out_at = (row // GROUP).to(gl.int64) * out_token_stride + row % GROUP * out_head_stride
            found = (mixed / total[:, None]).to(out.dtype.element_ty)
            gl.store(out + out_at[:, None] + d, found, mask=is_row[:, None])


@gluon.jit
def place_of(row, G: gl.constexpr, GROUP: gl.constexpr):
    """The (token, head) of a row, counted from row 0; rows are those of one key-value head."""
    return row // GROUP * (G * GROUP) + row % GROUP
