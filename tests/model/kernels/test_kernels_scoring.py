"""Windows, sinks and scales of attention: every kernel equals dense attention with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.attention import invariant_attention, prefill
from headway.model.kernels.attention.scoring import Scoring
from headway.model.kernels.attention.splits import DecodeSplit
from tests.model.kernels import test_kernels_decode as decodes
from tests.model.kernels import test_kernels_prefill as prompts
from tests.model.kernels.reference import prefill as reference
from tests.support.ordered_dots import use_ordered_dots

DEVICE = prompts.DEVICE
# One program, four, and four that load their first tile early.
SPLITS = [
    DecodeSplit(num_splits=count, min_positions=16, tile=16, warps=warps, stages=2)
    for count, warps in ((1, 1), (4, 1), (4, 4))
]
# Shorter than a block, as long, longer; and longer than every context.
WINDOWS = [1, 7, 16, 33, 200]


def sinks_of(num_heads: int) -> Tensor:
    return torch.randn(num_heads, generator=torch.Generator().manual_seed(num_heads), device="cpu")


def forget(blocks: Tensor, table: Tensor, num_seen: int) -> None:
    """Leave nothing of a sequence's first tokens: neither their blocks nor their numbers."""
    size = blocks.shape[4]
    whole, rest = divmod(max(num_seen, 0), size)
    blocks[table[whole].long(), decodes.LAYER, :, :, :rest] = torch.nan
    table[:whole] = 0  # a block of no sequence


def decoding(window: int, *, is_new: bool) -> decodes.World:
    case = decodes.Case(
        positions=(0, 5, 16, 40, 93), group=3, kv_heads=1, head_dim=32, is_new=is_new
    )
    world = decodes.world_of(case, seed=window)
    for row, position in zip(world.row_ids_s.tolist(), case.positions, strict=True):
        forget(world.blocks, world.tables[row], position - window + 1)
    return world


@pytest.mark.parametrize("window", WINDOWS)
def test_a_decode_sees_its_window_and_one_sink(window: int) -> None:
    """However many programs share it, and whether the token is new or stored already."""
    scoring = Scoring(0.3, window, sinks_of(3))
    for is_new, split in ((True, SPLITS[1 + window % 2]), (False, SPLITS[window % 2])):
        world = decoding(window, is_new=is_new)
        seen = decodes.found(
            world, split=split, scoring=scoring._replace(sinks=sinks_of(3).to(DEVICE))
        )
        assert decodes.distance(seen.out, decodes.exact(world, scoring=scoring).out) < 1e-5


def test_a_new_token_may_have_no_rope_and_a_factor_for_its_position() -> None:
    """Without a rope, as with one of angles that are zero."""
    world = decoding(200, is_new=True)
    turns = world.transform
    scaled = replace(turns, query_scale_p=torch.rand(len(turns.cosine_pd)) + 0.5)
    still = {"cosine_pd": torch.ones(600, 16), "sine_pd": torch.zeros(600, 16)}
    for given, asked in (
        (scaled, scaled),
        (replace(turns, cosine_pd=None, sine_pd=None), replace(turns, **still)),
    ):
        names = ("q_norm", "k_norm", "cosine_pd", "sine_pd", "query_scale_p")
        values = {name: getattr(given, name) for name in names}
        moved = {n: None if value is None else value.to(DEVICE) for n, value in values.items()}
        seen = decodes.found(world, transform=replace(given, **moved))
        assert decodes.distance(seen.out, decodes.exact(world, transform=asked).out) < 1e-5


# Prompts that start in and after the first window, and end at the end of a tile.
SEQUENCES = ((5, 0), (21, 30), (1, 70), (40, 88), (0, 3))


def prompt(window: int, dtype: torch.dtype = torch.float32) -> prompts.World:
    case = prompts.Case(sequences=SEQUENCES, group=3, kv_heads=1, head_dim=32, dtype=dtype)
    world = prompts.world_of(case, seed=window)
    for row, (_, earlier) in zip(world.row_ids_s.tolist(), SEQUENCES, strict=True):
        forget(world.blocks, world.tables[row], earlier - window + 1)
    return world


def expected(world: prompts.World, scoring: Scoring) -> Tensor:
    out = prompts.poisoned(world).double()
    reference.prefill_attention(world.q_thd.double(), out, scoring=scoring, **world.widened())
    return out


@pytest.mark.parametrize("window", WINDOWS)
def test_a_prompt_sees_windows_and_sinks(window: int) -> None:
    world = prompt(window)
    scoring = Scoring(None, window, sinks_of(3).to(DEVICE))
    out = prompts.poisoned(world)
    prefill.prefill_attention(world.q_thd, out, **world.arguments(), scoring=scoring)
    prompts.assert_close(out, expected(world, scoring))


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_and_sinks_keep_a_token_the_same_bits(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chunk, as a decode of one program and of several."""
    monkeypatch.setattr(invariant_attention, "SPLIT", 64)
    use_ordered_dots(monkeypatch)
    world = prompt(window)
    scoring = Scoring(None, window, sinks_of(3).to(DEVICE) if window != 7 else None)
    given, out = world.arguments(), prompts.poisoned(world)
    del given["longest"]
    invariant_attention.invariant_prefill_attention(world.q_thd, out, scoring=scoring, **given)
    prompts.assert_close(out, expected(world, scoring))
    last = world.starts_s[1:][world.starts_s.diff() > 0].long() - 1  # a token of each sequence
    given = {name: given[name] for name in ("blocks", "layer", "tables")}
    rows = world.row_ids_s[world.starts_s.diff() > 0]
    positions = world.ends_s[world.starts_s.diff() > 0].long() - 1
    for num_programs in (1, 2):
        alone = torch.full_like(world.q_thd[last], torch.nan)
        invariant_attention.invariant_decode_attention(
            world.q_thd[last], alone, row_ids_s=rows, positions_s=positions, scoring=scoring,
            num_programs=num_programs, **given,
        )  # fmt: skip
        assert torch.equal(alone, out[last])
