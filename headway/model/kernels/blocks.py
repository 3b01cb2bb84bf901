"""Copies whole blocks within a device: selected blocks to a contiguous buffer, and back.

Knows rows of words and their indices, not their content; copies to the host are made elsewhere.

Legend: B blocks, n of them, W words of 32 bits in one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import ceil_div, launched

PIECE = 4096  # words that a program copies


@launched
@triton.jit
def _move(
    to, source, to_numbers, source_numbers, num_words,
    HAS_TO: tl.constexpr, HAS_SOURCE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of one block; a side without numbers has its blocks in order."""
    place, word = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    target = tl.load(to_numbers + place) if HAS_TO else place
    origin = tl.load(source_numbers + place) if HAS_SOURCE else place
    is_here = word < num_words
    moved = tl.load(source + origin.to(tl.int64) * num_words + word, mask=is_here)
    tl.store(to + target.to(tl.int64) * num_words + word, moved, mask=is_here)


def gather_blocks(blocks: Tensor, numbers_n: Tensor, staging: Tensor) -> None:
    """Copy the blocks with these numbers (int64) to the start of `staging`, in this order."""
    _launch(staging, blocks, None, numbers_n)


def scatter_blocks(staging: Tensor, numbers_n: Tensor, blocks: Tensor) -> None:
    """Copy the first blocks of `staging` to the blocks with these numbers, which must differ."""
    _launch(blocks, staging, numbers_n, None)


def _launch(
    to: Tensor, source: Tensor, to_numbers: Tensor | None, source_numbers: Tensor | None
) -> None:
    numbers = to_numbers if to_numbers is not None else source_numbers
    assert numbers is not None and to.is_contiguous() and source.is_contiguous()
    if not len(numbers):
        return
    to_words, source_words = _words(to), _words(source)
    num_words = to_words.shape[1]
    _move[(len(numbers), ceil_div(num_words, PIECE))](
        to_words, source_words, to_numbers, source_numbers, num_words,
        HAS_TO=to_numbers is not None, HAS_SOURCE=source_numbers is not None, PIECE=PIECE,
        num_warps=8,
    )  # fmt: skip


def _words(blocks: Tensor) -> Tensor:
    """Blocks as rows of 32-bit words; the number of keys and values is always even."""
    return blocks.flatten(1).view(torch.int32)
