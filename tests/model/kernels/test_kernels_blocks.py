"""Copying blocks: the kernel and its reference write the same bytes and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels import blocks as kernel
from tests.model.kernels.reference import blocks as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPES = {  # layers, key-value heads, positions, head size
    "one position": (1, 1, 1, 64),
    "less than a piece": (3, 2, 16, 80),
    "several pieces, the last not full": (5, 3, 16, 96),
    "large": (2, 2, 64, 256),
}


def blocks_of(count: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Blocks of random bytes, including NaN."""
    layers, heads, positions, head_dim = shape
    width = 2 * heads * positions * head_dim * dtype.itemsize
    source = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count, layers, width), dtype=torch.uint8, generator=source)
    return raw.to(DEVICE).view(dtype).view(count, layers, 2, heads, positions, head_dim)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_and_scattered_blocks_equal_the_reference(shape: str, dtype: torch.dtype) -> None:
    held, staging = blocks_of(9, SHAPES[shape], dtype), blocks_of(6, SHAPES[shape], dtype)
    numbers = torch.tensor([7, 0, 8, 3], device=DEVICE)
    found, right = staging.clone(), staging.clone()
    kernel.gather_blocks(held, numbers, found)
    reference.gather_blocks(held, numbers, right)
    assert same(found, right) and same(found[1], held[0]) and same(found[4:], staging[4:])
    other, right = held.clone(), held.clone()
    kernel.scatter_blocks(staging, numbers, other)
    reference.scatter_blocks(staging, numbers, right)
    assert same(other, right) and same(other[8], staging[2]) and same(other[1], held[1])


def test_gathered_blocks_are_scattered_back_unchanged() -> None:
    held, staging = (blocks_of(count, (2, 2, 16, 64), torch.bfloat16) for count in (20, 5))
    numbers, before = torch.tensor([19, 4, 11], device=DEVICE), held.clone()
    kernel.gather_blocks(held, numbers, staging)
    held[numbers] = 0
    kernel.scatter_blocks(staging, numbers, held)
    assert same(held, before)


@pytest.mark.parametrize("number", [0, 1])
def test_no_blocks_or_one_block_work(number: int) -> None:
    """The compiler treats 1 as a constant."""
    held, staging = (blocks_of(count, (1, 1, 4, 16), torch.float32) for count in (3, 2))
    before, numbers = staging.clone(), torch.full((number,), 1, device=DEVICE)
    kernel.gather_blocks(held, numbers, staging)
    assert same(staging[:number], held[1 : 1 + number]) and same(staging[number:], before[number:])


def test_blocks_beyond_2_to_the_31_words_are_found() -> None:
    """The memory is never touched, so it costs nothing."""
    near = blocks_of(3, (2, 2, 16, 64), torch.float32)
    shift = 2**31 // near[0].numel() + 1
    far = torch.empty((shift + len(near), *near.shape[1:]), device=DEVICE)
    far[shift:] = near
    staging, numbers = torch.empty_like(near), torch.tensor([2, 0, 1], device=DEVICE) + shift
    kernel.gather_blocks(far, numbers, staging)
    assert same(staging, near[numbers - shift])
    kernel.scatter_blocks(near, numbers, far)
    assert same(far[numbers], near)
