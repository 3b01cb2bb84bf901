"""Attention in fixed splits equals the reference, and gives a token the same bits in any call."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.attention import invariant_attention as kernels
from tests.model.kernels.reference import prefill as reference
from tests.model.kernels.test_kernels_prefill import DEVICE, LAYER, LIMITS, Case, World, world_of
from tests.support.ordered_dots import use_ordered_dots

BFLOAT16 = [torch.bfloat16] if DEVICE == "cuda" else []  # the interpreter multiplies its raw bits


@pytest.fixture(autouse=True, scope="module")
def short_splits() -> object:
    """Short splits, so that short sequences have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SPLIT", 64)
        use_ordered_dots(patch)
        yield


CASES = {
    "several splits, ragged": Case(sequences=((20, 110), (1, 0), (0, 5), (3, 61)), head_dim=32),
    "seven heads, narrow": Case(sequences=((9, 120), (5, 0)), group=7, kv_heads=1, head_dim=80),
    "a block for each token": Case(sequences=((20, 50),), block_size=1, kv_heads=1),
    "half precision": Case(sequences=((9, 60),), dtype=torch.float16, head_dim=128, kv_heads=1),
    "more heads than a tile": Case(sequences=((2, 65), (1, 1)), group=20, kv_heads=1),
}


def prefilled(world: World) -> Tensor:
    given = world.arguments()
    del given["longest"]
    out = torch.full_like(world.q_thd, torch.nan)
    kernels.invariant_prefill_attention(world.q_thd, out, **given)
    return out


def decoded(world: World, num_programs: int) -> Tensor:
    """Every token as a decode, all in one call."""
    rows = zip(
        world.row_ids_s.tolist(), world.ends_s.tolist(), world.starts_s.diff().tolist(), strict=True
    )
    pairs = [(row, end - count + place) for row, end, count in rows for place in range(count)]
    row_ids, positions = torch.tensor(pairs, device=DEVICE).T.contiguous()
    out = torch.full_like(world.q_thd, torch.nan)
    kernels.invariant_decode_attention(
        world.q_thd, out, blocks=world.blocks, layer=LAYER, tables=world.tables,
        row_ids_s=row_ids.int(), positions_s=positions, num_programs=num_programs,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_chunk_equals_the_reference_and_its_tokens_as_decodes(case: Case) -> None:
    world = world_of(case)
    out = prefilled(world)
    assert torch.equal(out, decoded(world, 1)) and torch.equal(out, decoded(world, 3))
    wide, expected = world.widened(), torch.full_like(world.q_thd, torch.nan).double()
    reference.prefill_attention(world.q_thd.double(), expected, **wide)
    assert (out.double() - expected).abs().max() <= LIMITS[case.dtype]


WHOLE = Case(sequences=((150, 0),), head_dim=32)  # three splits


@cache
def whole() -> tuple[World, Tensor]:
    """One sequence, computed as one chunk."""
    world = world_of(replace(WHOLE, dtype=BFLOAT16[0] if BFLOAT16 else torch.float32))
    return world, prefilled(world)


@settings(max_examples=8, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 149), max_size=4),
    order=st.randoms(use_true_random=False),
    num_programs=st.integers(1, 3),
)
def test_chunks_in_any_order_have_the_bits_of_one_chunk(
    cuts: list[int], order: object, num_programs: int
) -> None:
    """The sequence is cut into chunks, which a call takes as sequences of their own."""
    world, expected = whole()
    ends = sorted({*cuts, 150})
    parts = list(zip([0, *ends], ends, strict=False))
    order.shuffle(parts)
    picked = torch.cat([torch.arange(*part) for part in parts])
    counts = torch.tensor([0, *(end - start for start, end in parts)])
    cut = replace(
        world, q_thd=world.q_thd[picked], starts_s=counts.cumsum(0).int().to(DEVICE),
        ends_s=torch.tensor([end for _, end in parts]).int().to(DEVICE),
        row_ids_s=world.row_ids_s.expand(len(parts)).contiguous(),
    )  # fmt: skip
    assert torch.equal(prefilled(cut), expected[picked])
    start, end = parts[-1]
    start = max(start, end - 3)
    tail = replace(
        world, q_thd=world.q_thd[start:end], ends_s=torch.tensor([end]),
        starts_s=torch.tensor([0, end - start]),
    )  # fmt: skip
    assert torch.equal(decoded(tail, num_programs), expected[start:end])
