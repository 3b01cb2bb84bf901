"""Products with 4-bit integers w = (q - zero) * scale, and dequantizing a whole matrix.

Few rows are bound by the bytes of the matrix, so it stays in 4 bits up to the registers. There
q - zero, which bfloat16 has exactly, is multiplied; the sum over a group is scaled in float32. The
outputs are the first operand of the tensor cores and the rows, which may be few, the second one: 8
rows are no waste. With many rows (q - zero) * scale is multiplied, rounded: one sum is less to keep.
For more it is cheaper to write the dequantized matrix once, for cuBLAS.

All programs run at once and have equal shares of the work: the blocks of a tile, then those of the
next tile. Of programs that share a tile, the last one to arrive adds up what each of them stored, in
the order of the inputs, so the sum does not depend on who that is.

A word has 8 numbers that are PLANE inputs apart: so a plane, the numbers at one place of PLANE words,
consists of consecutive inputs with one scale, and unpacking moves nothing between threads.

Shapes: M rows, N outputs, K inputs, B blocks of 8 planes, W words, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.activation import GATES
from headway.model.kernels.launch import begin, ceil_div, is_compiling, launch_options, launched
from headway.model.kernels.products.epilogue import finish, load_ends
from headway.model.kernels.products.tiles import device_limits
from headway.model.kernels.products.wide_linear import fetch_ahead

PLANE = 32  # inputs; groups are multiples of it
BLOCK = 8 * PLANE


class Int4Tile(NamedTuple):
    """The part of a product that a program computes.

    `programs` run at a time on a multiprocessor; its registers are divided among them. With
    `scales_numbers`, (q - zero) * scale is multiplied.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int
    scales_numbers: bool = False


# By the most rows that they are for; the fastest on an H200 with the shapes of Llama-2-7B.
TILES = {
    8: Int4Tile(8, 64, warps=2, stages=3, programs=4),
    16: Int4Tile(16, 64, warps=2, stages=3, programs=4),
    32: Int4Tile(32, 128, warps=4, stages=3, programs=2),
    128: Int4Tile(64, 128, warps=4, stages=2, programs=2, scales_numbers=True),
}
MAX_ROWS = 256  # with more, cuBLAS multiplies the dequantized matrix
DEQUANTIZED = 16  # outputs of a program
REGISTERS = 1 << 16  # of a multiprocessor
MIN_BLOCKS = 2  # of a program
NUM_COUNTERS = 1 << 16
FETCHED = tl.constexpr(3)  # blocks, while the previous kernel still runs


class Int4Matrix(NamedTuple):
    """A matrix [N, K] with its bias; the inputs of the last block may be padded."""

    words_bnw: Tensor  # int32
    scale_gn: Tensor  # float32
    zero_gn: Tensor  # uint8
    num_inputs: int
    group: int  # inputs with one scale
    bias_n: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.words_bnw.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self[:3])

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("embeddings are floats")

    def ordered(self, order_n: Tensor) -> Int4Matrix:
        """The outputs in this order."""
        words_bnw, scale_gn, zero_gn = (each[:, order_n] for each in self[:3])
        bias_n = None if self.bias_n is None else self.bias_n[order_n]
        return Int4Matrix(words_bnw, scale_gn, zero_gn, self.num_inputs, self.group, bias_n)


def pack(q_nk: Tensor, scale_ng: Tensor, zero_ng: Tensor) -> Int4Matrix:
    """Pack uint8 numbers below 16; each scale and zero point is that of K / G inputs."""
    num_outputs, num_inputs = q_nk.shape
    group = num_inputs // scale_ng.shape[1]
    assert group % PLANE == 0, f"{group} inputs of a group are no multiple of {PLANE}"
    planes = F.pad(q_nk, (0, -num_inputs % BLOCK)).view(num_outputs, -1, 8, PLANE).unbind(2)
    words = torch.zeros_like(planes[0], dtype=torch.int32)
    for place, plane in enumerate(planes):
        words |= plane.int() << 4 * place
    scale_gn, zero_gn = scale_ng.T.float().contiguous(), zero_ng.T.to(torch.uint8).contiguous()
    return Int4Matrix(words.transpose(0, 1).contiguous(), scale_gn, zero_gn, num_inputs, group)


# By place: the halves of two words that have the numbers, below the bits of 128, plus two shifts.
PAIRS = tl.constexpr(
    tuple(
        f"""{{
        .reg .b32 t, one;
        mov.b32 one, 0x3F803F80;
        prmt.b32 t, $1, $2, {halves};
        shr.b32 t, t, {bits};
        lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, t, one, $3;
        }}"""
        for halves in ("0x5410", "0x7632") for bits in (0, 4, 8, 12)
    )
)  # fmt: skip


@triton.jit
def _numbers(words, PLACE: tl.constexpr, zero):
    """(q - zero) * 16 ** (PLACE % 4) in float32, at a place of the words.

    A float32 of 2^23 + n has the bits of n below those of 2^23. So masking and one subtraction
    convert a number, at its place in the lower half of the word times a power of 16.
    """
    FACTOR: tl.constexpr = 16 ** (PLACE % 4)
    half = words if PLACE < 4 else words >> 16
    wide = ((half & (15 * FACTOR)) | 0x4B000000).to(tl.float32, bitcast=True)
    return wide - (8388608.0 + zero * FACTOR)


@triton.jit
def _pairs(words, PLACE: tl.constexpr, zero_n):
    """q - zero in bfloat16, from two words at a time; 128 + q has the bits of q below those of 128."""
    shift = (-128.0 - zero_n).to(tl.bfloat16)[:, None]
    return tl.inline_asm_elementwise(
        PAIRS[PLACE], "=r,r,r,r", [words, shift], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _scaled(a, scale_n):
    """a * scale in bfloat16, two numbers at a time."""
    given = [a, scale_n.to(tl.bfloat16)[:, None]]
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", given, dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _scales(scale_gn, zero_gn, start, near_n, num_outputs, K: tl.constexpr, GROUP: tl.constexpr):
    """The zero and scale of some outputs for the group of an input; padding has that of the last."""
    place = (tl.minimum(start, K - 1) // GROUP).to(tl.int64) * num_outputs + near_n
    return tl.load(zero_gn + place).to(tl.float32), tl.load(scale_gn + place)


@triton.jit
def _block_scales(
    scale_gn, zero_gn, block, near_n, num_outputs, K: tl.constexpr, GROUP: tl.constexpr,
    PLANE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Zero, scale, zero, scale and so on of a block, for each PLANES planes."""
    found = ()
    for plane in tl.static_range(0, 8, PLANES):
        start = (block * 8 + plane) * PLANE
        zero, scale = _scales(scale_gn, zero_gn, start, near_n, num_outputs, K, GROUP)
        found = found + (zero, scale)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _add_block(
    total, words, x, is_row, start, scales, K: tl.constexpr, PLANE: tl.constexpr,
    PLANES: tl.constexpr, IN_PAIRS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """`total` plus the products of a block; `x` points to input 0, and `start` is its first input."""
    k = tl.arange(0, PLANE)[:, None]
    for plane in tl.static_range(0, 8, PLANES):  # of one group
        zero, scale = scales[2 * (plane // PLANES)], scales[2 * (plane // PLANES) + 1]
        unscaled = tl.zeros_like(total)
        for each in tl.static_range(plane, plane + PLANES):
            at, is_given = start + each * PLANE, is_row[None, :]
            if K % (8 * PLANE):
                is_given = is_given & (k < K - at)
            b = tl.load(x + at, mask=is_given, other=0.0)
            if IN_PAIRS:
                a = (
                    _scaled(_pairs(words, each, zero), scale)
                    if SCALES
                    else _pairs(words, each, zero)
                )
            else:
                factor = scale[:, None] if SCALES else 1.0
                a = (_numbers(words, each, zero[:, None]) / 16 ** (each % 4) * factor).to(b.dtype)
            if SCALES:
                total = tl.dot(a, b, total, input_precision="ieee")
            else:
                unscaled = tl.dot(a, b, unscaled, input_precision="ieee")
        if not SCALES:
            total = tl.fma(unscaled, scale[:, None], total)
    return total


@triton.jit
def _first_block(program, num_blocks):
    """The first of all blocks, counted through the tiles, that a program has."""
    return program * num_blocks // tl.num_programs(0)


@triton.jit
def _program_of(block, num_blocks):
    """The program that has this block."""
    return ((block + 1) * tl.num_programs(0) - 1) // num_blocks


@triton.jit
def _joined(total, tile, start, parts, counters, num_blocks, BLOCKS: tl.constexpr):
    """Store a part of a tile; returns the whole tile and True to the last of its programs.

    `start` is the first block of this program.
    """
    N: tl.constexpr = total.shape[0]
    M: tl.constexpr = total.shape[1]
    AT_ONCE: tl.constexpr = 8 if N * M <= 1024 else 1  # loads that do not wait for each other
    place = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    program = tl.program_id(0)
    # A program has at most two parts of tiles: of its first tile, and of its last one.
    part = 2 * program + (start < tile * BLOCKS).to(tl.int32)
    tl.store(parts + part.to(tl.int64) * (N * M) + place, total)
    first = _program_of(tile * BLOCKS, num_blocks)
    last = _program_of(tile * BLOCKS + BLOCKS - 1, num_blocks)
    tl.debug_barrier()  # then the counter says that all threads have stored
    is_last = tl.atomic_add(counters + tile, 1) == last - first
    if is_last:
        tl.store(counters + tile, 0)
        total = tl.zeros((N, M), tl.float32)
        for some in tl.range(first, last + 1, AT_ONCE, num_stages=1):
            for other in tl.static_range(AT_ONCE):
                is_next = _first_block(some + other, num_blocks) < tile * BLOCKS
                part = 2 * (some + other) + is_next.to(tl.int32)
                home = parts + part.to(tl.int64) * (N * M) + place
                # Past the first cache: other multiprocessors have written it.
                is_part = some + other <= last
                total += tl.load(home, mask=is_part, other=0.0, cache_modifier=".cg")
    return total, is_last


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_mk, words_bnw, scale_gn, zero_gn, bias_n, residual_mn, out_mn, parts, counters,
    num_rows, num_outputs, x_stride, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, PLANES: tl.constexpr,
    IN_PAIRS: tl.constexpr, SCALES: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The blocks of a program. Row tiles of the same outputs are consecutive.

    PLANES consecutive planes have one scale.
    """
    BLOCK: tl.constexpr = 8 * PLANE
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    num_blocks = num_row_tiles * tl.cdiv(num_outputs, OUTPUTS) * BLOCKS
    low, high = (
        _first_block(tl.program_id(0), num_blocks), _first_block(tl.program_id(0) + 1, num_blocks)
    )  # fmt: skip
    k = tl.arange(0, PLANE)
    if CHAINED:
        first = low // BLOCKS // num_row_tiles * OUTPUTS
        near_n = (first + tl.arange(0, OUTPUTS)) % num_outputs
        for later in tl.static_range(FETCHED):
            line = tl.minimum(low % BLOCKS + later, BLOCKS - 1) * num_outputs + near_n
            fetch_ahead(words_bnw + line.to(tl.int64) * PLANE, 1)
    begin(CHAINED)
    for tile in tl.range(low // BLOCKS, tl.cdiv(high, BLOCKS), num_stages=1):
        first = tile // num_row_tiles * OUTPUTS
        m = tile % num_row_tiles * ROWS + tl.arange(0, ROWS)
        is_row, near_m = m < num_rows, (m % num_rows).to(tl.int64)
        near_n = (first + tl.arange(0, OUTPUTS)) % num_outputs
        x = x_mk + near_m[None, :] * x_stride + k[:, None]
        start, end = (
            tl.maximum(low - tile * BLOCKS, 0), tl.minimum(high - tile * BLOCKS, BLOCKS)
        )  # fmt: skip
        # They are read one block ahead: Triton does so only with what is multiplied.
        ahead = _block_scales(
            scale_gn, zero_gn, start, near_n, num_outputs, K, GROUP, PLANE, PLANES
        )
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for block in range(start, end):
            scales = ahead
            ahead = _block_scales(
                scale_gn, zero_gn, block + 1, near_n, num_outputs, K, GROUP, PLANE, PLANES
            )
            place = (block * num_outputs + near_n).to(tl.int64) * PLANE
            words = tl.load(words_bnw + place[:, None] + k[None, :])
            total = _add_block(
                total, words, x, is_row, block * BLOCK, scales, K, PLANE, PLANES, IN_PAIRS, SCALES
            )
        is_whole = end - start == BLOCKS
        if not is_whole:
            total, is_whole = _joined(total, tile, low, parts, counters, num_blocks, BLOCKS)
        if is_whole:
            bias, residual = load_ends(
                first, bias_n, residual_mn, near_m, is_row, num_outputs, out_stride, IS_GATED,
                OUTPUTS,
            )  # fmt: skip
            finish(
                tl.trans(total), first, 1.0, bias, residual, None, bias_n, residual_mn, out_mn,
                near_m, is_row, num_outputs, out_stride, IS_GATED,
            )  # fmt: skip


@launched
@triton.jit
def _dequantize(
    words_bnw, scale_gn, zero_gn, out_nk, num_outputs,
    K: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, OUTPUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One block of some outputs."""
    block, n = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k, near_n = tl.arange(0, PLANE), n % num_outputs
    begin(CHAINED)
    place = (block * num_outputs + near_n).to(tl.int64) * PLANE
    words = tl.load(words_bnw + place[:, None] + k[None, :])
    for plane in tl.static_range(8):
        start = block * 8 * PLANE + plane * PLANE
        zero, scale = _scales(scale_gn, zero_gn, start, near_n, num_outputs, K, GROUP)
        numbers = _numbers(words, plane, zero[:, None]) * (scale / 16 ** (plane % 4))[:, None]
        home = out_nk + n.to(tl.int64)[:, None] * K + start + k[None, :]
        tl.store(
            home,
            numbers.to(out_nk.dtype.element_ty),
            mask=(n < num_outputs)[:, None] & (k < K - start)[None, :],
        )


def dequantized(matrix: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in floats."""
    size = matrix.num_outputs, matrix.num_inputs
    out_nk = torch.empty(size, dtype=dtype, device=matrix.words_bnw.device)
    _dequantize[(len(matrix.words_bnw), ceil_div(size[0], DEQUANTIZED))](
        *matrix[:3], out_nk, *size, matrix.group, PLANE, DEQUANTIZED,
        **launch_options(4, 1, fuses=False),
    )  # fmt: skip
    return out_nk


def num_programs(tile: Int4Tile, matrix: Int4Matrix, num_rows: int) -> int:
    """As many as run at once, each with at least MIN_BLOCKS."""
    num_tiles = ceil_div(min(num_rows, MAX_ROWS), tile.rows) * ceil_div(
        matrix.num_outputs, tile.outputs
    )
    assert num_tiles <= NUM_COUNTERS, f"{num_tiles} tiles are more than {NUM_COUNTERS}"
    num_blocks = num_tiles * len(matrix.words_bnw)
    return max(1, min(tile.programs * device_limits()[0], num_blocks // MIN_BLOCKS))


@cache
def _counters(device: torch.device) -> Tensor:
    """One for each tile; they are zeros before and after a product."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def _registers(tile: Int4Tile) -> int:
    """Those of a thread, if `programs` run at a time."""
    return min(255, REGISTERS // (tile.programs * tile.warps * 32) // 8 * 8)


def int4_linear(
    x_mk: Tensor,
    matrix: Int4Matrix,
    *,
    is_gated: bool = False,
    residual_mn: Tensor | None = None,
    out_mn: Tensor | None = None,
    tile: Int4Tile | None = None,
) -> Tensor:
    """x matrix^T plus its bias; the options are those of linear.linear.

    Inside `compile_all` it launches all tiles, so that none is left when a pass of other sizes comes.
    """
    num_rows, num_outputs = len(x_mk), matrix.num_outputs
    if out_mn is None:
        out_mn = x_mk.new_empty((num_rows, num_outputs // 2 if is_gated else num_outputs))
    if not num_rows:
        return out_mn
    assert num_rows <= MAX_ROWS or is_compiling(), f"{num_rows} rows are for cuBLAS"
    assert x_mk.stride(1) == 1 and out_mn.stride(1) == 1, "rows must be contiguous"
    is_alike = residual_mn is None or num_rows == 1 or residual_mn.stride() == out_mn.stride()
    assert is_alike, "the residual must have the output's stride"
    tiles: Iterable[Int4Tile] = TILES.values()
    if tile is not None or not is_compiling():
        most = next((most for most in TILES if num_rows <= most), max(TILES))
        tiles = [tile or TILES[most]]
    for each in tiles:
        _launch(x_mk, matrix, residual_mn, out_mn, each, GATES["silu"] if is_gated else 0)
    return out_mn


def _launch(
    x_mk: Tensor,
    matrix: Int4Matrix,
    residual_mn: Tensor | None,
    out_mn: Tensor,
    tile: Int4Tile,
    gate: int,
) -> None:
    num_rows, num_outputs, device = len(x_mk), matrix.num_outputs, x_mk.device
    stage = 4 * tile.outputs * PLANE + x_mk.itemsize * tile.rows * BLOCK  # bytes
    stages = max(1, min(tile.stages, device_limits()[1] // stage))
    programs = num_programs(tile, matrix, num_rows)
    parts = torch.empty((2 * programs, tile.outputs, tile.rows), device=device)
    planes = gcd(matrix.group, BLOCK) // PLANE
    in_pairs = x_mk.dtype == torch.bfloat16 and x_mk.is_cuda
    _product[(programs,)](
        x_mk, *matrix[:3], matrix.bias_n, residual_mn, out_mn, parts, _counters(device), num_rows,
        num_outputs, x_mk.stride(0), out_mn.stride(0), matrix.num_inputs, matrix.group, PLANE,
        planes, in_pairs, tile.scales_numbers, gate, tile.rows, tile.outputs,
        maxnreg=_registers(tile), **launch_options(tile.warps, stages, fuses=False),
    )  # fmt: skip
