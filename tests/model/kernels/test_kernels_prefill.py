"""Prefill attention: the kernel equals its reference, and the reference equals dense attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.attention import prefill
from tests.model.kernels.reference import prefill as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LAYER, NUM_LAYERS = 1, 3
ON_CARD = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bf16's raw bits")
BFLOAT16 = pytest.param(torch.bfloat16, marks=ON_CARD)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
HALF_TYPES = pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences as (new rows, earlier tokens), and the shape of the model."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    num_shared: int = 0  # leading blocks that all tables share


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Inputs of a call. The cache is NaN wherever no sequence has a token."""

    q_thd: Tensor  # a view into wider rows
    blocks: Tensor
    tables: Tensor
    row_ids_s: Tensor
    starts_s: Tensor
    ends_s: Tensor
    longest: int

    def arguments(self) -> dict[str, Any]:
        names = ("blocks", "tables", "row_ids_s", "starts_s", "ends_s", "longest")
        return {name: getattr(self, name) for name in names} | {"layer": LAYER}

    def widened(self) -> dict[str, Any]:
        return self.arguments() | {"blocks": self.blocks.double()}


def world_of(case: Case, seed: int = 0) -> World:
    torch.manual_seed(seed)
    counts = torch.tensor([count for count, _ in case.sequences])
    ends = counts + torch.tensor([earlier for _, earlier in case.sequences])
    tables, row_ids = tables_of(case, ends)
    blocks = filled_blocks(case, tables[row_ids], ends)
    q_width = case.kv_heads * case.group * case.head_dim
    rows = torch.full((int(counts.sum()), q_width + 24), float("nan"))
    rows[:, :q_width] = torch.randn(len(rows), q_width)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    q_thd = rows.to(DEVICE, case.dtype)[:, :q_width].unflatten(1, (-1, case.head_dim))
    return World(
        q_thd=q_thd, blocks=blocks.to(DEVICE, case.cache_dtype or case.dtype),
        tables=tables.int().to(DEVICE), row_ids_s=row_ids.int().to(DEVICE),
        starts_s=starts.int().to(DEVICE), ends_s=ends.int().to(DEVICE),
        longest=int(counts.max()),
    )  # fmt: skip


def tables_of(case: Case, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and rows in random order; block 0 and two rows are unused."""
    held = -(-ends // case.block_size)
    order = iter((torch.randperm(int(held.sum())) + 1).tolist())
    row_ids = torch.randperm(len(ends) + 2)[: len(ends)]
    tables = torch.zeros(len(ends) + 2, int(held.max()) + 1, dtype=torch.long)
    for row_id, num_blocks in zip(row_ids.tolist(), held.tolist(), strict=True):
        tables[row_id, :num_blocks] = torch.tensor([next(order) for _ in range(num_blocks)])
        shared = min(case.num_shared, num_blocks)
        tables[row_id, :shared] = tables[row_ids[0], :shared]
    return tables, row_ids


def filled_blocks(case: Case, tables_s: Tensor, ends: Tensor) -> Tensor:
    shape = (NUM_LAYERS, 2, case.kv_heads, case.block_size, case.head_dim)
    blocks = torch.full((int(tables_s.max()) + 1, *shape), float("nan"))
    for table, end in zip(tables_s, ends.tolist(), strict=True):
        position = torch.arange(end)
        block, offset = table[position // case.block_size], position % case.block_size
        kept = torch.randn(end, 2, case.kv_heads, case.head_dim)
        blocks[block, LAYER, :, :, offset] = kept
    return blocks


def poisoned(world: World) -> Tensor:
    return torch.full(world.q_thd.shape, float("nan"), dtype=world.q_thd.dtype, device=DEVICE)


def expected(world: World) -> Tensor:
    out = poisoned(world).double()
    reference.prefill_attention(world.q_thd.double(), out, **world.widened())
    return out


def assert_close(out: Tensor, reference: Tensor) -> None:
    error = (out.double() - reference).norm() / reference.norm()
    assert error < LIMITS[out.dtype], f"relative error {error:.2e} in {out.dtype}"  # NaN fails too


def assert_kernel_is_right(case: Case, seed: int = 0) -> None:
    world = world_of(case, seed)
    out = poisoned(world)
    prefill.prefill_attention(world.q_thd, out, **world.arguments())
    assert_close(out, expected(world))


RAGGED = ((5, 0), (1, 40), (0, 0), (37, 70), (0, 9), (1, 0), (70, 3), (2, 63))


@pytest.mark.parametrize("block_size", [1, 16, 24, 64, 256])
def test_every_block_size_gives_the_same_result(block_size: int) -> None:
    assert_kernel_is_right(Case(sequences=RAGGED, block_size=block_size), seed=block_size)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@TYPES
def test_every_head_size_is_supported(head_dim: int, dtype: torch.dtype) -> None:
    sequences = ((3, 20), (0, 5), (66, 7), (1, 33))
    assert_kernel_is_right(Case(sequences=sequences, head_dim=head_dim, dtype=dtype), head_dim)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@HALF_TYPES
def test_every_group_of_query_heads_is_supported(group: int, dtype: torch.dtype) -> None:
    case = Case(sequences=((19, 0), (1, 12), (40, 55)), group=group, kv_heads=3, dtype=dtype)
    assert_kernel_is_right(case, seed=group)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 129])
@HALF_TYPES
def test_tile_boundaries_are_handled(rows: int, dtype: torch.dtype) -> None:
    for earlier in (0, 1, 62, 63, 64):  # 62: the first row does not see one key of the first tile
        case = Case(sequences=((rows, earlier),), kv_heads=1, dtype=dtype)
        assert_kernel_is_right(case, seed=rows)


@HALF_TYPES
def test_an_8_bit_cache_is_read_as_it_was_rounded(dtype: torch.dtype) -> None:
    case = Case(sequences=RAGGED, dtype=dtype, cache_dtype=torch.float8_e4m3fn, block_size=24)
    assert_kernel_is_right(case)


def test_sequences_may_share_blocks() -> None:
    case = Case(sequences=((9, 55), (1, 50), (30, 48), (4, 60)), num_shared=3)
    assert_kernel_is_right(case)


def test_hundreds_of_sequences_find_their_own_rows() -> None:
    """More than one search step covers, and most of them without rows."""
    sequences = tuple((s % 4 if s % 7 == 0 or 250 < s < 260 else 0, s % 3 + 1) for s in range(300))
    assert_kernel_is_right(Case(sequences=sequences, kv_heads=1, group=1, block_size=4))


def test_blocks_beyond_2_to_the_31_numbers_are_found() -> None:
    """The memory is never touched, so it costs nothing."""
    case = Case(sequences=((6, 20),), dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    world = world_of(case)
    near, far = poisoned(world), poisoned(world)
    prefill.prefill_attention(world.q_thd, near, **world.arguments())
    shift = 2**31 // world.blocks[0].numel() + 1
    blocks = torch.empty((shift + len(world.blocks), *world.blocks.shape[1:]),
                         dtype=world.blocks.dtype, device=DEVICE)  # fmt: skip
    blocks[shift:] = world.blocks
    moved = world.arguments() | {"blocks": blocks, "tables": world.tables + shift}
    prefill.prefill_attention(world.q_thd, far, **moved)
    assert torch.equal(near, far)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    world = world_of(Case(sequences=((90, 11),), group=3))
    whole, parts = poisoned(world), poisoned(world)
    prefill.prefill_attention(world.q_thd, whole, **world.arguments())
    for first, last in ((0, 1), (1, 50), (50, 90)):
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
        ends = torch.tensor([11 + last], dtype=torch.int32, device=DEVICE)
        chunk = world.arguments() | {"starts_s": starts, "ends_s": ends, "longest": last - first}
        prefill.prefill_attention(world.q_thd[first:last], parts[first:last], **chunk)
    assert_close(parts, whole.double())


@HALF_TYPES
@pytest.mark.parametrize("longest", [70, 5000])
def test_longest_may_be_overstated(longest: int, dtype: torch.dtype) -> None:
    """As in a captured pass; the tiles are different then."""
    world = world_of(Case(sequences=RAGGED, dtype=dtype))
    out = poisoned(world)
    prefill.prefill_attention(world.q_thd, out, **world.arguments() | {"longest": longest})
    assert_close(out, expected(world))


def test_only_the_rows_of_sequences_are_written() -> None:
    world = world_of(Case(sequences=((5, 3), (20, 0)), head_dim=80))
    room = torch.full((25, 4, 96), 7.0, device=DEVICE)
    prefill.prefill_attention(world.q_thd, room[:, :, :80], **world.arguments())
    assert_close(room[:, :, :80], expected(world))
    assert (room[:, :, 80:] == 7.0).all()


@TYPES
def test_padding_sequences_and_rows_change_nothing(dtype: torch.dtype) -> None:
    world = world_of(Case(sequences=((3, 0), (40, 5), (1, 70), (9, 9), (2, 0)) * 5, dtype=dtype))
    count, most, spare = len(world.q_thd), 32 - len(world.ends_s), len(world.tables) - 1
    padded = replace(
        world,
        q_thd=torch.cat([world.q_thd, torch.zeros_like(world.q_thd[:20])]),
        row_ids_s=F.pad(world.row_ids_s, (0, most), value=spare),
        starts_s=F.pad(world.starts_s, (0, most), value=count),
        ends_s=F.pad(world.ends_s, (0, most)),
    )
    out = poisoned(padded)
    prefill.prefill_attention(padded.q_thd, out, **padded.arguments())
    assert_close(out[:count], expected(world))
    assert out[count:].isnan().all()


@TYPES
@pytest.mark.parametrize("num_before", [1, 31, 32, 200])
def test_rows_before_the_first_sequence_are_not_touched(
    num_before: int, dtype: torch.dtype
) -> None:
    """Decodes come first in a batch."""
    world = world_of(Case(sequences=((3, 0), (40, 5), (1, 70)), dtype=dtype))
    before = torch.zeros((num_before, *world.q_thd.shape[1:]), dtype=dtype, device=DEVICE)
    # The memory before the first start must not matter either.
    starts = F.pad(world.starts_s + num_before, (1, 0))[1:]
    later = replace(world, q_thd=torch.cat([before, world.q_thd]), starts_s=starts)
    out = poisoned(later)
    out[:num_before] = 7.0
    prefill.prefill_attention(later.q_thd, out, **later.arguments())
    assert_close(out[num_before:], expected(world))
    assert (out[:num_before] == 7.0).all()


@pytest.mark.parametrize("sequences", [(), ((0, 0),), ((0, 5), (0, 0))])
def test_no_tokens_launch_nothing(sequences: tuple[tuple[int, int], ...]) -> None:
    world = world_of(Case(sequences=sequences or ((0, 0),)))
    arguments = world.arguments()
    if not sequences:
        none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        arguments |= {"row_ids_s": none, "ends_s": none}
    prefill.prefill_attention(world.q_thd, poisoned(world), **arguments)


def test_large_scores_do_not_overflow() -> None:
    world = world_of(Case(sequences=((40, 30),)))
    world.q_thd.mul_(300.0)
    out = poisoned(world)
    prefill.prefill_attention(world.q_thd, out, **world.arguments())
    assert_close(out, expected(world))


def test_the_reference_equals_dense_causal_attention() -> None:
    """For one sequence with consecutive blocks, the cache is the dense keys and values."""
    world = world_of(Case(sequences=((33, 0),), group=3, block_size=33))
    keys_gnd, values_gnd = world.blocks[1, LAYER].double()
    dense = torch.nn.functional.scaled_dot_product_attention(
        world.q_thd.double().transpose(0, 1), keys_gnd.repeat_interleave(3, 0),
        values_gnd.repeat_interleave(3, 0), is_causal=True,
    )  # fmt: skip
    torch.testing.assert_close(expected(world), dense.transpose(0, 1))
