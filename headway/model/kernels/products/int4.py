"""Products with 4-bit integers w = (q - zero) * scale, and dequantizing a whole matrix.

Few rows are bound by the bytes of the matrix, so it stays in 4 bits up to the registers. There
q - zero, which bfloat16 has exactly, is multiplied; the sum over a group is scaled in float32. The
outputs are the first operand of the tensor cores and the rows, which may be few, the second one: 8
rows are no waste. A matrix of few outputs is summed in parts of the inputs, which wide_linear.py adds
in order. For many rows it is cheaper to write the dequantized matrix once, for cuBLAS.

A word has 8 numbers that are PLANE inputs apart: so a plane, the numbers at one place of PLANE words,
consists of consecutive inputs with one scale, and unpacking moves nothing between threads.

Shapes: M rows, N outputs, K inputs, B blocks of 8 planes, W words, G groups, P parts of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from headway.model.kernels.products.wide_linear import fetch_ahead, sum_parts

PLANE = 32  # inputs; groups are multiples of it
BLOCK = 8 * PLANE


class Int4Tile(NamedTuple):
    """The part of a product that a program computes.

    `programs` run at a time on a multiprocessor: its registers are divided among them, and the inputs
    among as many as fill all multiprocessors once.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int


# By the most rows that they are for.
TILES = {
    8: Int4Tile(8, 64, warps=2, stages=3, programs=6),
    16: Int4Tile(16, 128, warps=4, stages=3, programs=3),
    64: Int4Tile(32, 128, warps=4, stages=3, programs=2),
    128: Int4Tile(64, 128, warps=4, stages=2, programs=2),
}
MAX_ROWS = 256  # with more, cuBLAS multiplies the dequantized matrix
DEQUANTIZED = 16  # outputs of a program
REGISTERS = 1 << 16  # of a multiprocessor
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


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_mk, words_bnw, scale_gn, zero_gn, bias_n, residual_mn, out_mn, parts_pmn,
    num_rows, num_outputs, x_stride, out_stride,
    K: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, PLANES: tl.constexpr,
    PARTS: tl.constexpr, IN_PAIRS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile, summed over one part of the inputs. Row tiles of the same outputs are consecutive.

    PLANES consecutive planes have one scale.
    """
    BLOCK: tl.constexpr = 8 * PLANE
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    SPAN: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS
    num_row_tiles, part = tl.cdiv(num_rows, ROWS), tl.program_id(1)
    first = tl.program_id(0) // num_row_tiles * OUTPUTS
    m, n = (
        tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS),
        first + tl.arange(0, OUTPUTS),
    )
    is_row, near_m, near_n = m < num_rows, (m % num_rows).to(tl.int64), n % num_outputs
    k = tl.arange(0, PLANE)
    x = x_mk + near_m[None, :] * x_stride + k[:, None]
    # They are read one block ahead: Triton does so only with what is multiplied.
    ahead = _block_scales(
        scale_gn, zero_gn, part * SPAN, near_n, num_outputs, K, GROUP, PLANE, PLANES
    )
    if CHAINED:
        for block in tl.static_range(FETCHED):
            line = (tl.minimum(part * SPAN + block, BLOCKS - 1) * num_outputs + near_n).to(tl.int64)
            fetch_ahead(words_bnw + line * PLANE, 1)
    begin(CHAINED)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(part * SPAN, tl.minimum(part * SPAN + SPAN, BLOCKS)):
        scales = ahead
        ahead = _block_scales(
            scale_gn, zero_gn, block + 1, near_n, num_outputs, K, GROUP, PLANE, PLANES
        )
        place = (block * num_outputs + near_n).to(tl.int64) * PLANE
        words = tl.load(words_bnw + place[:, None] + k[None, :])
        for plane in tl.static_range(0, 8, PLANES):  # of one group
            start = block * BLOCK + plane * PLANE
            zero, scale = scales[2 * (plane // PLANES)], scales[2 * (plane // PLANES) + 1]
            unscaled = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for each in tl.static_range(PLANES):
                at = start + each * PLANE
                is_given = is_row[None, :]
                if K % BLOCK:
                    is_given = is_given & (k[:, None] < K - at)
                b = tl.load(x + at, mask=is_given, other=0.0)
                if IN_PAIRS:
                    a = _pairs(words, plane + each, zero)
                else:
                    shifted = _numbers(words, plane + each, zero[:, None])
                    a = (shifted / 16 ** ((plane + each) % 4)).to(b.dtype)
                unscaled = tl.dot(a, b, unscaled, input_precision="ieee")
            total = tl.fma(unscaled, scale[:, None], total)
    total_mn = tl.trans(total)
    if PARTS == 1:
        bias, residual = load_ends(
            first, bias_n, residual_mn, near_m, is_row, num_outputs, out_stride, IS_GATED, OUTPUTS
        )
        finish(
            total_mn, first, 1.0, bias, residual, None, bias_n, residual_mn, out_mn, near_m, is_row,
            num_outputs, out_stride, IS_GATED,
        )  # fmt: skip
    else:
        home = (part * num_rows + m)[:, None] * num_outputs + n[None, :]
        is_inside = is_row[:, None] & (n < num_outputs)[None, :]
        tl.store(parts_pmn + home, total_mn, mask=is_inside)


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


def num_parts(tile: Int4Tile, matrix: Int4Matrix) -> int:
    """The most parts of the inputs with which all programs of a row tile run at once; at most 16."""
    wanted = tile.programs * device_limits()[0] // ceil_div(matrix.num_outputs, tile.outputs)
    num_blocks = len(matrix.words_bnw)
    parts = max(1, min(16, wanted, num_blocks))
    return ceil_div(num_blocks, ceil_div(num_blocks, parts))  # none is empty


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
    num_rows, num_outputs, parts = len(x_mk), matrix.num_outputs, num_parts(tile, matrix)
    stage = 4 * tile.outputs * PLANE + x_mk.itemsize * tile.rows * BLOCK  # bytes
    stages = max(1, min(tile.stages, device_limits()[1] // stage))
    shape, parts_pmn = (parts, min(num_rows, MAX_ROWS), num_outputs), None
    if parts > 1:
        parts_pmn = torch.empty(shape, dtype=torch.float32, device=x_mk.device)
    ends = matrix.bias_n, residual_mn, out_mn
    planes = gcd(matrix.group, BLOCK) // PLANE
    in_pairs = x_mk.dtype == torch.bfloat16 and x_mk.is_cuda
    num_programs = ceil_div(num_outputs, tile.outputs) * ceil_div(num_rows, tile.rows)
    _product[(num_programs, parts)](
        x_mk, *matrix[:3], *ends, parts_pmn, num_rows, num_outputs, x_mk.stride(0),
        out_mn.stride(0), matrix.num_inputs, matrix.group, PLANE, planes, parts, in_pairs, gate,
        tile.rows, tile.outputs, maxnreg=_registers(tile),
        **launch_options(tile.warps, stages, fuses=False),
    )  # fmt: skip
    if parts_pmn is not None:
        given = (*ends, None, num_rows, num_outputs, 0.0)
        sum_parts(parts_pmn, None, given, (matrix.num_inputs, 1, 1, gate), tile.outputs)
