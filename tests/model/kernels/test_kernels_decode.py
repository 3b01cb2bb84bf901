"""Decode attention: the kernel equals its reference, and the reference equals dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.attention.decode import HeadTransform, decode_attention
from headway.model.kernels.attention.splits import (
    BUSY,
    ENOUGH,
    EVEN,
    HALVES,
    LEADING,
    LONG,
    MANY,
    MAX_PREFILL_SPLITS,
    SHORT,
    SPLIT_COUNTS,
    WORTH,
    DecodeSplit,
    choose_num_splits,
    prefill_splits,
    split_counts,
    split_for,
)
from tests.model.kernels.reference import decode as reference
from tests.model.kernels.reference.rotary import rotate_and_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float8_e4m3fn: 5e-2}
LAYER, NUM_LAYERS, NUM_POSITIONS, EPSILON = 1, 3, 600, 1e-5
# Few programs: in the interpreter, even a program without work takes time.
SMALL = DecodeSplit(num_splits=2, min_positions=32, tile=16, warps=1, stages=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Positions of the tokens, and the shape of the model."""

    positions: tuple[int, ...] = (0, 1, 15, 40)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: the model's type
    is_new: bool = True
    has_norm: bool = True
    size: float = 1.0  # scale of queries and keys

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def kept(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


CASES = {
    "the bundled model": Case(group=3, kv_heads=3, has_norm=False),
    "queries and keys normed": Case(head_dim=128, block_size=24, kv_heads=1, dtype=torch.float16),
    "a block for each token": Case(group=7, kv_heads=1, head_dim=80, block_size=1),
    "a head for each query": Case(group=1, head_dim=96, block_size=64, dtype=torch.float16),
    "wide heads": Case(group=8, kv_heads=1, head_dim=256, positions=(0, 33)),
    "more heads than a tile": Case(group=20, kv_heads=1, has_norm=False),
    "four to a key": Case(group=4, head_dim=96, block_size=100, has_norm=False),
    "brain floats": Case(head_dim=128, dtype=torch.bfloat16),
    "an eight-bit cache": Case(
        head_dim=128, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, block_size=32
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Inputs of a call. The cache is NaN wherever no sequence has a token."""

    case: Case
    qkv: Tensor  # a view into wider rows
    blocks: Tensor
    tables: Tensor
    row_ids_s: Tensor
    positions_s: Tensor
    slots_s: Tensor
    transform: HeadTransform

    def arguments(self, device: str = DEVICE) -> dict[str, Any]:
        """Copies, so that calls do not affect each other."""
        names = ("blocks", "tables", "row_ids_s", "positions_s", "slots_s")
        given = {name: getattr(self, name).to(device, copy=True) for name in names}
        given |= {"num_heads": self.case.heads, "layer": LAYER}
        if not self.case.is_new:
            return given | {"slots_s": None}
        norms = [norm if norm is None else norm.to(device) for norm in self.norms]
        rope = self.transform.cosine_pd.to(device), self.transform.sine_pd.to(device)
        return given | {"transform": HeadTransform(*norms, self.transform.epsilon, *rope)}

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        return self.transform.q_norm, self.transform.k_norm

    def new_out(self, dtype: torch.dtype) -> Tensor:
        shape = (len(self.qkv), self.case.heads * self.case.head_dim)
        return torch.full(shape, torch.nan, dtype=dtype)


def world_of(case: Case, seed: int = 0) -> World:
    torch.manual_seed(seed)
    positions = torch.tensor(case.positions, dtype=torch.int64)
    tables, row_ids = tables_of(case, positions)
    rows = torch.full((len(positions), case.width + 24), torch.nan)
    rows[:, : case.width] = torch.randn(len(rows), case.width) * case.size
    angles = torch.outer(torch.arange(NUM_POSITIONS), torch.randn(case.head_dim // 2).exp())
    norms = [(torch.randn(case.head_dim) + sign).to(case.dtype) for sign in (1, -1)]
    slots = tables[row_ids, positions // case.block_size] * case.block_size
    return World(
        case=case, qkv=rows.to(case.dtype)[:, : case.width],
        blocks=filled_blocks(case, tables[row_ids], positions).to(case.kept),
        tables=tables.int(), row_ids_s=row_ids.int(), positions_s=positions,
        slots_s=slots + positions % case.block_size,
        transform=HeadTransform(
            *(norms if case.has_norm else (None, None)), EPSILON, angles.cos(), angles.sin()
        ),
    )  # fmt: skip


def tables_of(case: Case, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and rows in random order; block 0 and two rows are unused."""
    held = positions // case.block_size + 1
    order = iter((torch.randperm(int(held.sum())) + 1).tolist())
    row_ids = torch.randperm(len(positions) + 2)[: len(positions)]
    tables = torch.zeros(len(positions) + 2, int(held.max()) + 1, dtype=torch.long)
    for row_id, num_blocks in zip(row_ids.tolist(), held.tolist(), strict=True):
        tables[row_id, :num_blocks] = torch.tensor([next(order) for _ in range(num_blocks)])
    return tables, row_ids


def filled_blocks(case: Case, tables_s: Tensor, positions: Tensor) -> Tensor:
    """The tokens before each position, and the token itself unless it is new."""
    shape = (NUM_LAYERS, 2, case.kv_heads, case.block_size, case.head_dim)
    blocks = torch.full((int(tables_s.max()) + 1, *shape), torch.nan)
    for table, position in zip(tables_s, positions.tolist(), strict=True):
        at = torch.arange(position if case.is_new else position + 1)
        block, offset = table[at // case.block_size], at % case.block_size
        kept = torch.randn(len(at), 2, case.kv_heads, case.head_dim)
        kept[:, 0] *= case.size
        blocks[block, LAYER, :, :, offset] = kept
    return blocks


@contextmanager
def poison() -> Iterator[None]:
    """Uninitialized memory holds NaN. `use_deterministic_algorithms` imports torch's compiler."""
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The output of a call, on the CPU."""

    out: Tensor
    blocks: Tensor


def found(world: World, **options: Any) -> Seen:
    options.setdefault("split", SMALL)
    given, qkv = world.arguments() | options, world.qkv.to(DEVICE)
    out = world.new_out(world.qkv.dtype).to(DEVICE)
    decode_attention(qkv, out, **given)
    assert torch.equal(qkv.cpu(), world.qkv), "rows are read, not written"
    return Seen(out=out.cpu(), blocks=given["blocks"].cpu().float())


@cache
def of_a_new_token(case: Case) -> tuple[World, Seen]:
    """Several tests look at the same call."""
    world = world_of(case)
    return world, found(world)


def exact(world: World, **options: Any) -> Seen:
    """The reference's result in float64, except for the rotation."""
    given = world.arguments("cpu") | options
    if not world.case.cache_dtype:  # otherwise a new token is rounded to it before it is read
        given["blocks"] = given["blocks"].double()
    out = world.new_out(torch.float64)
    if transform := given.get("transform"):
        norms = [norm if norm is None else norm.float() for norm in world.norms]
        given["transform"] = replace(transform, q_norm=norms[0], k_norm=norms[1])
    reference.decode_attention(world.qkv.double(), out, **given)
    return Seen(out=out, blocks=given["blocks"].double())


def distance(one: Tensor, other: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    drawn: Case = request.param
    if DEVICE == "cpu" and drawn.dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16's raw bits, and rounds to eight without carry")
    return drawn


def test_a_new_token_sees_all_before_it_and_itself(case: Case) -> None:
    world, seen = of_a_new_token(case)
    assert distance(seen.out, exact(world).out) < LIMITS[case.dtype]


def test_a_prepared_query_sees_all_up_to_itself(case: Case) -> None:
    world = world_of(replace(case, is_new=False))
    seen = found(world)
    assert distance(seen.out, exact(world).out) < LIMITS[case.dtype]
    assert torch.equal(seen.blocks.nan_to_num(9), world.blocks.float().nan_to_num(9))


def test_a_new_token_is_stored_in_its_slot_and_nothing_else_changes(case: Case) -> None:
    world, seen = of_a_new_token(case)
    stored, right, before = seen.blocks, exact(world).blocks, world.blocks.float()
    is_new = before.isnan() & ~right.isnan()
    assert is_new.sum() == len(case.positions) * 2 * case.kv_heads * case.head_dim
    assert distance(stored[is_new], right[is_new]) < LIMITS[case.kept]
    assert torch.equal(stored[~is_new].nan_to_num(9), before[~is_new].nan_to_num(9))


def test_a_token_without_a_slot_is_not_stored_and_sees_itself(case: Case) -> None:
    world, stored = of_a_new_token(case)
    slots = world.slots_s.clone()
    slots[::2] = -1
    some = found(world, slots_s=slots.to(DEVICE))
    assert torch.equal(some.out, stored.out)
    right = exact(world, slots_s=slots).blocks
    assert torch.equal(some.blocks.isnan(), right.isnan())
    assert right.isnan().sum() > stored.blocks.isnan().sum()


def test_a_single_token_yields_its_value(case: Case) -> None:
    world = world_of(replace(case, positions=(0, 0)))
    values = world.qkv[:, -case.kv_heads * case.head_dim :].unflatten(1, (case.kv_heads, -1))
    values = values.to(case.kept).to(case.dtype).repeat_interleave(case.group, dim=1)
    assert torch.equal(found(world).out, values.flatten(1))


LENGTHS = (0, 1, 2, 31, 32, 33, 64, 70, 130, 300)
SPLITS = [
    DecodeSplit(num_splits=1, min_positions=4096, tile=16, warps=1, stages=2),
    DecodeSplit(num_splits=1, min_positions=4096, tile=64, warps=4, stages=3),
    DecodeSplit(num_splits=2, min_positions=16, tile=16, warps=1, stages=2),
    DecodeSplit(num_splits=8, min_positions=32, tile=32, warps=4, stages=2),
    DecodeSplit(num_splits=8, min_positions=128, tile=16, warps=1, stages=2),
    DecodeSplit(num_splits=4, min_positions=128, tile=16, warps=1, stages=3),
    DecodeSplit(num_splits=1, min_positions=64, tile=16, warps=1, stages=4),
    DecodeSplit(num_splits=4, min_positions=256, tile=16, warps=1, stages=4),
    DecodeSplit(num_splits=8, min_positions=512, tile=16, warps=1, stages=4),
    DecodeSplit(num_splits=32, min_positions=16, tile=16, warps=1, stages=2),
    DecodeSplit(num_splits=64, min_positions=64, tile=64, warps=4, stages=2),
    DecodeSplit(num_splits=64, min_positions=64, tile=16, warps=1, stages=4),
    DecodeSplit(num_splits=32, min_positions=32, tile=16, warps=1, stages=4),
]


# On a GPU all of these; in the interpreter, blocks of 24 for every split and others for some.
SPLIT_CASES = [
    (split, block_size, is_new)
    for number, split in enumerate(SPLITS)
    for block_size, is_new in product((16, 24, 64), (True, False))
    if DEVICE == "cuda" or block_size == 24
    or (block_size, is_new) == list(product((16, 64), (True, False)))[number % 4]
]  # fmt: skip


def lengths(split: DecodeSplit) -> tuple[int, ...]:
    """In the interpreter, the last positions of a split, the first of the next one, and two more."""
    if DEVICE == "cuda":
        return LENGTHS
    edge = split.min_positions if split.min_positions <= 256 else 32
    return 0, edge - 1, edge, 300 if split.num_splits > 1 else 100


@pytest.mark.parametrize(("split", "block_size", "is_new"), SPLIT_CASES, ids=str)
def test_any_number_of_programs_may_split_a_sequence(
    split: DecodeSplit, block_size: int, is_new: bool
) -> None:
    world = world_of(
        Case(positions=lengths(split), kv_heads=1, block_size=block_size, is_new=is_new)
    )
    with poison():
        out = found(world, split=split).out
    assert distance(out, exact(world).out) < LIMITS[torch.float32]


def test_a_split_is_chosen_if_none_is_given() -> None:
    world = world_of(Case(positions=(70,), kv_heads=1, is_new=False))
    with poison():
        out = found(world, split=None).out
    assert distance(out, exact(world).out) < LIMITS[torch.float32]


def test_large_scores_do_not_overflow_or_vanish() -> None:
    world = world_of(Case(positions=(3, 100), size=40.0, has_norm=False))
    assert distance(found(world).out, exact(world).out) < LIMITS[torch.float32]


def test_sequences_may_have_blocks_in_common() -> None:
    case = Case(positions=(70, 75, 64), kv_heads=1)
    world = world_of(case)
    world.tables[world.row_ids_s.long(), :4] = world.tables[int(world.row_ids_s[0]), :4]
    assert distance(found(world).out, exact(world).out) < LIMITS[torch.float32]


def test_padding_rows_share_a_row_and_change_nothing() -> None:
    world = world_of(Case(positions=(40, 0, 0)))
    slots = torch.where(world.positions_s > 0, world.slots_s, -1)
    spare = set(range(len(world.tables))) - set(world.row_ids_s.tolist())
    world.row_ids_s[1:] = min(spare)
    seen = found(world, slots_s=slots.to(DEVICE))
    assert distance(seen.out, exact(world, slots_s=slots).out) < LIMITS[torch.float32]


def test_a_new_token_equals_one_that_was_rotated_and_stored_before() -> None:
    world = world_of(Case(positions=(0, 20, 37)))
    transform, qkv, blocks = world.transform, world.qkv.clone(), world.blocks.clone()
    rotate_and_store(
        qkv, num_heads=world.case.heads, num_kv_heads=world.case.kv_heads, q_norm=transform.q_norm,
        k_norm=transform.k_norm, epsilon=transform.epsilon, cosine_pd=transform.cosine_pd,
        sine_pd=transform.sine_pd,
        positions_t=world.positions_s, slots_t=world.slots_s, blocks=blocks, layer=LAYER,
    )  # fmt: skip
    ready = replace(world, qkv=qkv, blocks=blocks, case=replace(world.case, is_new=False))
    assert distance(found(world).out, found(ready).out) < LIMITS[torch.float32]


def test_no_sequences_launch_nothing() -> None:
    world = world_of(Case())
    given = world.arguments()
    none = {name: given[name][:0] for name in ("row_ids_s", "positions_s", "slots_s")}
    qkv = world.qkv[:0].to(DEVICE)
    decode_attention(qkv, world.new_out(qkv.dtype)[:0].to(DEVICE), **given | none)
    assert torch.equal(given["blocks"].cpu().nan_to_num(9), world.blocks.nan_to_num(9))


def test_the_reference_equals_dense_attention() -> None:
    case = Case(positions=(50,), kv_heads=2, group=3, is_new=False, block_size=16)
    world = world_of(case)
    table = world.tables[world.row_ids_s.long()[0]].long()
    keys, values = world.blocks[table[:4], LAYER].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :51]
    q_h1d = world.qkv[0, : case.heads * case.head_dim].view(case.heads, 1, case.head_dim)
    grouped = (part.repeat_interleave(case.group, dim=0) for part in (keys, values))
    right = F.scaled_dot_product_attention(q_h1d, *grouped)
    assert distance(exact(world).out, right.view(1, -1)) < 1e-6


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_chosen_split_is_valid(dtype: torch.dtype, head_dim: int) -> None:
    padded = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    for num_programs in (*range(1, 100), *range(100, 3000, 29)):
        counts = {*SPLIT_COUNTS, *split_counts(num_programs)}
        for num_splits, max_positions in product(counts, (1, 300, 512, 1024, 10**6)):
            split = split_for(num_programs, num_splits, max_positions, head_dim * dtype.itemsize)
            assert all(
                is_power_of_two(size) for size in (split.num_splits, split.tile, split.warps)
            ), split
            assert (
                split.tile >= 16 and split.min_positions % split.tile == 0 and split.stages >= 1
            ), split
            waiting = 2 * (split.stages - 1) * split.tile * padded
            assert waiting <= 128 * 1024, "bytes of keys and values in flight"


def test_few_programs_split_their_sequences_and_many_only_long_ones() -> None:
    chosen = [split_for(num_programs, 1, 10**6, 256) for num_programs in range(1, 3000)]
    counts = [split.num_splits for split in chosen]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1
    num_warps = [n * split.num_splits * split.warps for n, split in enumerate(chosen, 1)]
    assert min(num_warps[counts.count(counts[0]) :]) >= 800
    for num_splits in SPLIT_COUNTS[1:]:
        shared = [split_for(n, num_splits, 10**6, 256).num_splits for n in range(MANY, 3000)]
        assert set(shared) == {num_splits}
        few = [split_for(n, num_splits, 10**6, 256).num_splits for n in range(1, MANY)]
        assert min(few) > 1, "a long sequence must not delay all others"


def test_programs_share_prompts_only_while_processors_are_idle() -> None:
    counts = [prefill_splits(num_tiles, 132) for num_tiles in range(1, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == MAX_PREFILL_SPLITS and counts[66:] == [1] * (999 - 66)
    assert all(tiles * count <= 132 for tiles, count in enumerate(counts, 1) if count > 1)


def test_a_few_long_sequences_are_split_in_eight() -> None:
    heads, many = 8, MANY // 8
    lengths = np.full(many, 500)

    def num_splits(num_long: int) -> int:
        lengths[:num_long] = 5000
        return choose_num_splits(many * heads, lengths, heads)

    few = BUSY // heads
    assert (num_splits(0), num_splits(1), num_splits(few)) == (1, 8, 8)
    assert num_splits(few + 1) == 1, "enough long sequences keep the device busy"
    assert choose_num_splits(ENOUGH - 1, lengths, heads) == 1, "few programs are split anyway"
    lengths[:] = np.linspace(400, 400 + WORTH, many)
    assert choose_num_splits(many * heads, lengths, heads) == 1, "the lead is too small"
    assert choose_num_splits(MANY, np.array([9000, 10]), 1000) == 4, "too few sequences"
    assert choose_num_splits(MANY, np.array([], dtype=np.int64), 8) == 1, "only padding"


def test_a_long_sequence_among_few_is_split_further() -> None:
    lengths = np.full(40, 500)
    assert choose_num_splits(40 * 8, lengths, 8) == 1
    lengths[7] = 8000
    assert choose_num_splits(40 * 8, lengths, 8) == LEADING
    assert split_for(40 * 8, LEADING, 10**6, 256).num_splits == LEADING
    assert split_for(40 * 8, 1, 10**6, 256).num_splits < LEADING
    lengths[:20] = 8000
    assert choose_num_splits(40 * 8, lengths, 8) == 1, "enough long sequences keep the device busy"


def test_many_long_sequences_are_split_in_four() -> None:
    for many in (MANY // 8, 256):
        lengths = np.arange(many) % 100 + LONG - 50
        assert choose_num_splits(many * 8, lengths - 50, 8) == 1
        assert choose_num_splits(many * 8, lengths + 50, 8) == 4
        assert choose_num_splits(ENOUGH - 1, lengths + 50, 8) == 1, "few programs are split anyway"


def test_with_enough_programs_sequences_are_whole_if_they_are_short_or_alike() -> None:
    short, alike = np.linspace(10, SHORT, 64), np.linspace(1000, 1900, 64)
    uneven = np.where(np.arange(64) < 48, 100, 1000)
    for num_programs in (ENOUGH, EVEN - 1, EVEN, MANY - 1):
        chosen = [choose_num_splits(num_programs, lengths, 8) for lengths in (short, alike, uneven)]
        assert chosen == [1, 1 if num_programs >= EVEN else HALVES, HALVES]
        assert {*chosen} <= {*split_counts(num_programs)}
        assert [split_for(num_programs, n, 10**6, 256).num_splits for n in chosen] == chosen


def test_a_sequence_is_not_split_into_programs_without_work() -> None:
    for num_programs in range(1, 384):
        for max_positions in (1, 16, 100, 1000, 5000):
            split = split_for(num_programs, 1, max_positions, 256)
            assert (
                split.num_splits == 1
                or (split.num_splits // 2) * split.min_positions < max_positions
            ), split
