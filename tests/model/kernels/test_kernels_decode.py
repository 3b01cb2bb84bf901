"""Laws of decode attention: the kernel, its twin, and dense attention say the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.decode import HeadTransform, decode_attention
from headway.model.kernels.splits import (
    BUSY,
    LONG,
    MANY,
    SPLIT_COUNTS,
    WORTH,
    Cut,
    choose_num_splits,
    split_for,
)
from tests.model.kernels.reference import decode as twin
from tests.model.kernels.reference.rotary import rotate_and_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float8_e4m3fn: 5e-2,
}
LAYER, NUM_LAYERS, NUM_POSITIONS, EPSILON = 1, 3, 600, 1e-5
# Few programs, unlike on a GPU: one that finds nothing to do takes the interpreter its time too.
SMALL = Cut(parts=2, least=32, tile=16, warps=1, stages=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Positions of the tokens that attend, and what the model is like."""

    positions: tuple[int, ...] = (0, 1, 15, 40)
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: the same
    is_new: bool = True
    has_norm: bool = True
    size: float = 1.0  # of queries and keys

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
    """A cache that holds NaN wherever no sequence has a token, fresh rows, and where all lies."""

    case: Case
    qkv: Tensor  # a view into wider rows
    blocks: Tensor
    tables: Tensor
    row_ids_s: Tensor
    positions_s: Tensor
    slots_s: Tensor
    turn: HeadTransform

    def arguments(self, device: str = DEVICE) -> dict[str, Any]:
        """Copies: what a call changes is its own."""
        names = ("blocks", "tables", "row_ids_s", "positions_s", "slots_s")
        given = {name: getattr(self, name).to(device, copy=True) for name in names}
        given |= {"num_heads": self.case.heads, "layer": LAYER}
        if not self.case.is_new:
            return given | {"slots_s": None}
        norms = [norm if norm is None else norm.to(device) for norm in self.norms]
        turns = self.turn.cosine_pd.to(device), self.turn.sine_pd.to(device)
        return given | {"turn": HeadTransform(*norms, self.turn.epsilon, *turns)}

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        return self.turn.q_norm, self.turn.k_norm

    def new_out(self, dtype: torch.dtype) -> Tensor:
        shape = (len(self.qkv), self.case.heads * self.case.head_dim)
        return torch.full(shape, torch.nan, dtype=dtype)


def world_of(case: Case, seed: int = 0) -> World:
    torch.manual_seed(seed)
    positions = torch.tensor(case.positions, dtype=torch.int64)
    tables, seats = tables_of(case, positions)
    rows = torch.full((len(positions), case.width + 24), torch.nan)
    rows[:, : case.width] = torch.randn(len(rows), case.width) * case.size
    angles = torch.outer(torch.arange(NUM_POSITIONS), torch.randn(case.head_dim // 2).exp())
    norms = [(torch.randn(case.head_dim) + sign).to(case.dtype) for sign in (1, -1)]
    slots = tables[seats, positions // case.block_size] * case.block_size
    return World(
        case=case, qkv=rows.to(case.dtype)[:, : case.width],
        blocks=filled_blocks(case, tables[seats], positions).to(case.kept),
        tables=tables.int(), row_ids_s=seats.int(), positions_s=positions,
        slots_s=slots + positions % case.block_size,
        turn=HeadTransform(*(norms if case.has_norm else (None, None)), EPSILON, angles.cos(), angles.sin()),
    )  # fmt: skip


def tables_of(case: Case, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks in no order, seats in no order; block 0 and two seats are no one's."""
    held = positions // case.block_size + 1
    order = iter((torch.randperm(int(held.sum())) + 1).tolist())
    seats = torch.randperm(len(positions) + 2)[: len(positions)]
    tables = torch.zeros(len(positions) + 2, int(held.max()) + 1, dtype=torch.long)
    for seat, num_blocks in zip(seats.tolist(), held.tolist(), strict=True):
        tables[seat, :num_blocks] = torch.tensor([next(order) for _ in range(num_blocks)])
    return tables, seats


def filled_blocks(case: Case, tables_s: Tensor, positions: Tensor) -> Tensor:
    """With the tokens before each position, and with its own unless that is new."""
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
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What a call wrote, on the CPU."""

    out: Tensor
    blocks: Tensor


def found(world: World, **options: Any) -> Seen:
    options.setdefault("cut", SMALL)
    given, qkv = world.arguments() | options, world.qkv.to(DEVICE)
    out = world.new_out(world.qkv.dtype).to(DEVICE)
    decode_attention(qkv, out, **given)
    assert torch.equal(qkv.cpu(), world.qkv), "rows are read, not written"
    return Seen(out=out.cpu(), blocks=given["blocks"].cpu().float())


def exact(world: World, **options: Any) -> Seen:
    """What the twin makes of the same numbers, in float64 but for the turns."""
    given = world.arguments("cpu") | options
    if not world.case.cache_dtype:  # else a new token is rounded to it before it is seen
        given["blocks"] = given["blocks"].double()
    out = world.new_out(torch.float64)
    if turn := given.get("turn"):
        norms = [norm if norm is None else norm.float() for norm in world.norms]
        given["turn"] = replace(turn, q_norm=norms[0], k_norm=norms[1])
    twin.decode_attention(world.qkv.double(), out, **given)
    return Seen(out=out, blocks=given["blocks"].double())


def distance(one: Tensor, other: Tensor) -> float:
    """How far off, relative to the size of what is right; NaN if anything is."""
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    drawn: Case = request.param
    if DEVICE == "cpu" and drawn.dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16's raw bits, and rounds to eight without carry")
    return drawn


def test_a_new_token_sees_all_before_it_and_itself(case: Case) -> None:
    world = world_of(case)
    assert distance(found(world).out, exact(world).out) < LIMITS[case.dtype]


def test_a_ready_query_sees_all_up_to_itself(case: Case) -> None:
    world = world_of(replace(case, is_new=False))
    seen = found(world)
    assert distance(seen.out, exact(world).out) < LIMITS[case.dtype]
    assert torch.equal(seen.blocks.nan_to_num(9), world.blocks.float().nan_to_num(9))


def test_a_new_token_is_stored_in_its_slot_and_nothing_else_changes(case: Case) -> None:
    world = world_of(case)
    stored, right, before = found(world).blocks, exact(world).blocks, world.blocks.float()
    is_new = before.isnan() & ~right.isnan()
    assert is_new.sum() == len(case.positions) * 2 * case.kv_heads * case.head_dim
    assert distance(stored[is_new], right[is_new]) < LIMITS[case.kept]
    assert torch.equal(stored[~is_new].nan_to_num(9), before[~is_new].nan_to_num(9))


def test_a_token_without_a_slot_is_not_stored_and_sees_itself(case: Case) -> None:
    world = world_of(case)
    slots = world.slots_s.clone()
    slots[::2] = -1
    stored, some = found(world), found(world, slots_s=slots.to(DEVICE))
    assert torch.equal(some.out, stored.out)
    right = exact(world, slots_s=slots).blocks
    assert torch.equal(some.blocks.isnan(), right.isnan())
    assert right.isnan().sum() > stored.blocks.isnan().sum()


def test_a_token_alone_is_its_value(case: Case) -> None:
    world = world_of(replace(case, positions=(0, 0)))
    values = world.qkv[:, -case.kv_heads * case.head_dim :].unflatten(1, (case.kv_heads, -1))
    values = values.to(case.kept).to(case.dtype).repeat_interleave(case.group, dim=1)
    assert torch.equal(found(world).out, values.flatten(1))


LENGTHS = (0, 1, 2, 31, 32, 33, 64, 70, 130, 300)
CUTS = [
    Cut(parts=1, least=4096, tile=16, warps=1, stages=2),
    Cut(parts=1, least=4096, tile=64, warps=4, stages=3),
    Cut(parts=2, least=16, tile=16, warps=1, stages=2),
    Cut(parts=8, least=32, tile=32, warps=4, stages=2),
    Cut(parts=8, least=128, tile=16, warps=1, stages=2),
    Cut(parts=4, least=128, tile=16, warps=1, stages=3),
    Cut(parts=1, least=64, tile=16, warps=1, stages=4),
    Cut(parts=4, least=256, tile=16, warps=1, stages=4),
    Cut(parts=8, least=512, tile=16, warps=1, stages=4),
    Cut(parts=32, least=16, tile=16, warps=1, stages=2),
    Cut(parts=64, least=64, tile=64, warps=4, stages=2),
]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("block_size", [16, 24, 64])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_number_of_programs_may_share_a_sequence(
    cut: Cut, block_size: int, is_new: bool
) -> None:
    world = world_of(Case(positions=LENGTHS, kv_heads=1, block_size=block_size, is_new=is_new))
    with poison():
        out = found(world, cut=cut).out
    assert distance(out, exact(world).out) < LIMITS[torch.float32]


def test_a_cut_is_found_if_none_is_given() -> None:
    world = world_of(Case(positions=(70,), kv_heads=1, is_new=False))
    with poison():
        out = found(world, cut=None).out
    assert distance(out, exact(world).out) < LIMITS[torch.float32]


def test_great_scores_neither_overflow_nor_are_lost() -> None:
    world = world_of(Case(positions=(3, 100), size=40.0, has_norm=False))
    assert distance(found(world).out, exact(world).out) < LIMITS[torch.float32]


def test_sequences_may_have_blocks_in_common() -> None:
    case = Case(positions=(70, 75, 64), kv_heads=1)
    world = world_of(case)
    world.tables[world.row_ids_s.long(), :4] = world.tables[int(world.row_ids_s[0]), :4]
    assert distance(found(world).out, exact(world).out) < LIMITS[torch.float32]


def test_rows_that_fill_a_batch_up_share_a_seat_and_harm_nobody() -> None:
    world = world_of(Case(positions=(40, 0, 0)))
    slots = torch.where(world.positions_s > 0, world.slots_s, -1)
    spare = set(range(len(world.tables))) - set(world.row_ids_s.tolist())
    world.row_ids_s[1:] = min(spare)
    seen = found(world, slots_s=slots.to(DEVICE))
    assert distance(seen.out, exact(world, slots_s=slots).out) < LIMITS[torch.float32]


def test_a_new_token_is_one_that_was_turned_and_stored_before() -> None:
    world = world_of(Case(positions=(0, 20, 37)))
    turn, qkv, blocks = world.turn, world.qkv.clone(), world.blocks.clone()
    rotate_and_store(
        qkv, num_heads=world.case.heads, num_kv_heads=world.case.kv_heads, q_norm=turn.q_norm,
        k_norm=turn.k_norm, epsilon=turn.epsilon, cosine_pd=turn.cosine_pd, sine_pd=turn.sine_pd,
        positions_t=world.positions_s, slots_t=world.slots_s, blocks=blocks, layer=LAYER,
    )  # fmt: skip
    ready = replace(world, qkv=qkv, blocks=blocks, case=replace(world.case, is_new=False))
    assert distance(found(world).out, found(ready).out) < LIMITS[torch.float32]


def test_no_sequences_are_no_work() -> None:
    world = world_of(Case())
    given = world.arguments()
    none = {name: given[name][:0] for name in ("row_ids_s", "positions_s", "slots_s")}
    qkv = world.qkv[:0].to(DEVICE)
    decode_attention(qkv, world.new_out(qkv.dtype)[:0].to(DEVICE), **given | none)
    assert torch.equal(given["blocks"].cpu().nan_to_num(9), world.blocks.nan_to_num(9))


def test_the_twin_is_dense_attention() -> None:
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
def test_every_cut_that_is_chosen_is_legal(dtype: torch.dtype, head_dim: int) -> None:
    padded = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    for num_programs in (*range(1, 100), *range(100, 3000, 7)):
        for num_splits, room in product(SPLIT_COUNTS, (1, 300, 512, 1024, 10**6)):
            cut = split_for(num_programs, num_splits, room, head_dim * dtype.itemsize)
            assert all(is_power_of_two(size) for size in (cut.parts, cut.tile, cut.warps)), cut
            assert cut.tile >= 16 and cut.least % cut.tile == 0 and cut.stages >= 1, cut
            waiting = 2 * (cut.stages - 1) * cut.tile * padded
            assert waiting <= 128 * 1024, "keys and values on their way"


def test_few_programs_share_their_sequences_and_many_only_long_ones() -> None:
    counts = [split_for(num_programs, 1, 10**6, 256).parts for num_programs in range(1, 3000)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1
    assert all(n * count >= 800 for n, count in enumerate(counts, 1) if count < counts[0])
    for num_splits in SPLIT_COUNTS[1:]:
        shared = [split_for(n, num_splits, 10**6, 256).parts for n in range(MANY, 3000)]
        assert set(shared) == {num_splits}
        few = [split_for(n, num_splits, 10**6, 256).parts for n in range(1, MANY)]
        assert min(few) > 1, "one long sequence must not keep all others waiting"


def test_eight_share_if_a_few_are_longer_than_those_that_keep_the_device_busy() -> None:
    heads, many = 8, MANY // 8
    lengths = np.full(many, 500)

    def num_splits(num_long: int) -> int:
        lengths[:num_long] = 5000
        return choose_num_splits(many * heads, lengths, heads)

    few = BUSY // heads
    assert (num_splits(0), num_splits(1), num_splits(few)) == (1, 8, 8)
    assert num_splits(few + 1) == 1, "these are enough to keep it busy"
    assert choose_num_splits(MANY - 1, lengths, heads) == 1, "they are shared anyway"
    lengths[:] = np.linspace(400, 400 + WORTH, many)
    assert choose_num_splits(many * heads, lengths, heads) == 1, "nothing to gain"
    assert choose_num_splits(MANY, np.array([9000, 10]), 1000) == 4, "fewer sequences than that"
    assert choose_num_splits(MANY, np.array([], dtype=np.int64), 8) == 1, "rows of nobody"


def test_four_share_if_many_are_long() -> None:
    for many in (MANY // 8, 256):
        lengths = np.arange(many) % 100 + LONG - 50
        assert choose_num_splits(many * 8, lengths - 50, 8) == 1
        assert choose_num_splits(many * 8, lengths + 50, 8) == 4
        assert choose_num_splits(MANY - 1, lengths + 50, 8) == 1, "they are shared anyway"


def test_no_more_programs_share_a_sequence_than_its_room_gives_work() -> None:
    for num_programs in range(1, 384):
        for room in (1, 16, 100, 1000, 5000):
            cut = split_for(num_programs, 1, room, 256)
            assert cut.parts == 1 or (cut.parts // 2) * cut.least < room, cut
