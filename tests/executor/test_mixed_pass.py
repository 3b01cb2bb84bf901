"""Rounded sizes of mixed passes: few, and close to the exact size."""

from __future__ import annotations

import pytest

from headway.executor.gpu.mixed_pass import captured_sizes, round_up, round_up_chunks


def test_rounded_sizes_are_few_and_close() -> None:
    for least, num_steps, most, num_sizes in ((32, 1, 256, 4), (32, 2, 256, 6), (64, 4, 8192, 24)):
        sizes = [round_up(count, least, num_steps) for count in range(1, most + 1)]
        for count, size in enumerate(sizes, start=1):
            assert count <= size < count + max(least, 1 + count / num_steps)
            assert round_up(size, least, num_steps) == size
        assert sizes == sorted(sizes) and len(set(sizes)) == num_sizes


def test_a_padded_pass_has_room_for_all_chunks() -> None:
    assert round_up_chunks(0, 0) == (0, 0)
    for num_tokens in range(1, 1100, 7):
        for num_chunks in range(1, min(num_tokens, 256), 5):
            tokens, chunks = round_up_chunks(num_tokens, num_chunks)
            assert tokens >= num_tokens and chunks >= num_chunks
            assert (tokens, chunks) == round_up_chunks(tokens, 1), "one of the captured sizes"


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_few_sizes_are_captured_largest_first(num_kv_heads: int) -> None:
    """Each takes 10 to 20 ms, and the engine is not ready before."""
    sizes = captured_sizes(256, 6500, num_kv_heads)
    assert len(sizes) == len(set(sizes)) <= 160
    rows = [size.decodes + size.tokens for size in sizes]
    assert rows == sorted(rows, reverse=True)
