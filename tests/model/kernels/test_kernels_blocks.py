"""Laws of moved blocks: kernel and twin leave the same bytes, and touch no others."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

pytest.importorskip("triton")

from headway.model.kernels import blocks as kernel
from tests.model.kernels.reference import blocks as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPES = {  # layers, key-value heads, positions, head size
    "one position": (1, 1, 1, 64),
    "less than a piece": (3, 2, 16, 80),
    "several pieces, the last not full": (5, 3, 16, 96),
    "large": (2, 8, 64, 256),
}


def blocks_of(count: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Blocks of any bytes, NaN among them."""
    layers, heads, positions, head_dim = shape
    width = 2 * heads * positions * head_dim * dtype.itemsize
    source = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count, layers, width), dtype=torch.uint8, generator=source)
    return raw.to(DEVICE).view(dtype).view(count, layers, 2, heads, positions, head_dim)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_set_aside_and_put_back_are_the_twins(shape: str, dtype: torch.dtype) -> None:
    held, room = blocks_of(9, SHAPES[shape], dtype), blocks_of(6, SHAPES[shape], dtype)
    numbers = torch.tensor([7, 0, 8, 3], device=DEVICE)
    found, right = room.clone(), room.clone()
    kernel.gather_blocks(held, numbers, found)
    twin.gather_blocks(held, numbers, right)
    assert same(found, right) and same(found[1], held[0]) and same(found[4:], room[4:])
    other, right = held.clone(), held.clone()
    kernel.scatter_blocks(room, numbers, other)
    twin.scatter_blocks(room, numbers, right)
    assert same(other, right) and same(other[8], room[2]) and same(other[1], held[1])


def test_what_was_set_aside_comes_back_whole() -> None:
    held, room = (blocks_of(count, (2, 2, 16, 64), torch.bfloat16) for count in (20, 5))
    numbers, before = torch.tensor([19, 4, 11], device=DEVICE), held.clone()
    kernel.gather_blocks(held, numbers, room)
    held[numbers] = 0
    kernel.scatter_blocks(room, numbers, held)
    assert same(held, before)


@pytest.mark.parametrize("number", [0, 1])
def test_no_blocks_or_one_are_no_special_case(number: int) -> None:
    """A number of 1 is a constant to the compiler."""
    held, room = (blocks_of(count, (1, 1, 4, 16), torch.float32) for count in (3, 2))
    before, numbers = room.clone(), torch.full((number,), 1, device=DEVICE)
    kernel.gather_blocks(held, numbers, room)
    assert same(room[:number], held[1 : 1 + number]) and same(room[number:], before[number:])


def test_blocks_far_into_a_large_cache_are_found() -> None:
    """Past 2**31 words; memory that is never touched costs nothing."""
    near = blocks_of(3, (2, 2, 16, 64), torch.float32)
    shift = 2**31 // near[0].numel() + 1
    far = torch.empty((shift + len(near), *near.shape[1:]), device=DEVICE)
    far[shift:] = near
    room, numbers = torch.empty_like(near), torch.tensor([2, 0, 1], device=DEVICE) + shift
    kernel.gather_blocks(far, numbers, room)
    assert same(room, near[numbers - shift])
    kernel.scatter_blocks(near, numbers, far)
    assert same(far[numbers], near)
