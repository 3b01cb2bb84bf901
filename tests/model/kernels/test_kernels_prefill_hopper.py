"""Prefill attention in Gluon: the kernel equals the reference on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from headway.model.kernels.attention import prefill
from tests.model.kernels.test_kernels_prefill import RAGGED, Case, assert_close, expected, poisoned
from tests.model.kernels.test_kernels_prefill import world_of as make_world
from tests.support.hopper import ON_HOPPER

LONG = ((300, 0), (1, 500), (0, 0), (129, 128), (0, 9), (64, 64), (700, 3), (2, 63), (128, 1000))


def assert_hopper_is_right(case: Case, seed: int = 0) -> None:
    world = make_world(case, seed)
    q_thd = torch.cat([world.q_thd, poisoned(world)], dim=1)[:, : world.q_thd.shape[1]]
    world = replace(world, q_thd=q_thd)  # a view into wider rows
    kernel = prefill.hopper_kernel()
    assert kernel is not None and kernel.supports(world.q_thd, world.blocks)
    counters = torch.zeros(2**12, dtype=torch.int32, device=q_thd.device)
    for given in (None, counters, counters):  # twice: the first launch leaves zeros
        out = poisoned(world)
        prefill.prefill_attention(world.q_thd, out, **world.arguments(), counters=given)
        assert_close(out, expected(world))
        assert not counters.any()


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("sequences", [RAGGED, LONG], ids=["short", "long"])
def test_the_kernel_is_right(
    sequences: tuple[tuple[int, int], ...], block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(sequences=sequences, block_size=block_size, head_dim=head_dim, dtype=dtype)
    assert_hopper_is_right(case, seed=block_size)


@ON_HOPPER
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_every_group_of_heads_is_right(group: int) -> None:
    case = Case(sequences=LONG, group=group, head_dim=128, dtype=torch.bfloat16)
    assert_hopper_is_right(case, seed=group)


@ON_HOPPER
def test_random_batches_are_right() -> None:
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        pairs = torch.randint(0, 400, (8, 2), generator=source).tolist()
        sequences = tuple((count, earlier) for count, earlier in pairs)
        case = Case(sequences=sequences, head_dim=128, dtype=torch.bfloat16, num_shared=seed % 3)
        assert_hopper_is_right(case, seed)


@ON_HOPPER
@pytest.mark.parametrize("group", [1, 2, 7])
def test_programs_that_share_queries_are_right(group: int) -> None:
    """Few queries over many keys: parts of the keys, of different lengths."""
    for seed, sequences in enumerate(
        (
            ((64, 5000),), ((1, 16383), (7, 16384), (130, 2047)), ((100, 2048), (3, 0), (20, 9000)),
            ((300, 3000),), ((33, 1900), (0, 0), (17, 30_000)),
        )
    ):  # fmt: skip
        case = Case(sequences=sequences, group=group, head_dim=128, dtype=torch.bfloat16)
        assert_hopper_is_right(case, seed)


@ON_HOPPER
def test_a_sequence_whose_rows_have_no_position_does_not_block() -> None:
    """Captured passes run with padding, whose numbers need not agree."""
    world = make_world(Case(sequences=LONG, head_dim=128, dtype=torch.bfloat16))
    out = torch.zeros_like(world.q_thd)
    arguments = world.arguments() | {"ends_s": torch.zeros_like(world.ends_s)}
    kernel = prefill.hopper_kernel()
    assert kernel is not None
    del arguments["longest"]
    arguments["num_tokens"] = len(out)
    kernel.prefill_attention_hopper(world.q_thd.contiguous(), out, **arguments)
    torch.cuda.synchronize()
    assert not out.any()


@pytest.mark.parametrize(
    ("capability", "version", "is_used"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.9.1+git", True), ((9, 0), "3.5.1", False),
     ((9, 0), "3.10.0", False), ((8, 0), "3.6.0", False), ((10, 0), "3.6.0", False)],
)  # fmt: skip
def test_it_is_used_on_hopper_gpus_with_a_tried_triton(
    capability: tuple[int, int], version: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(prefill.triton, "__version__", version)
    assert (prefill.hopper_kernel.__wrapped__() is not None) == is_used


def test_other_types_and_sizes_are_left_to_the_plain_kernel() -> None:
    from headway.model.kernels.attention.prefill_hopper import supports

    def is_supported(dtype: torch.dtype, cache: torch.dtype, block_size: int, dim: int) -> bool:
        blocks = torch.empty((2, 1, 2, 1, block_size, dim), dtype=cache)
        return supports(torch.empty((3, 2, dim), dtype=dtype), blocks)

    half, bfloat, fp8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    assert all(is_supported(half, half, size, 128) for size in (16, 32, 64, 128, 256, 384))
    assert not any(is_supported(bfloat, bfloat, size, 128) for size in (1, 8, 24, 48, 144))
    assert not is_supported(bfloat, bfloat, 16, 64)
    assert not is_supported(bfloat, fp8, 16, 128)
    assert not is_supported(torch.float32, torch.float32, 16, 128)
