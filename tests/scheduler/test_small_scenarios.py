"""Small scenarios under every preset: no step is stuck, every request ends, nothing leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from headway.request import Request, RequestParams
from headway.scheduler import PRESETS, preset
from headway.scheduler.policies.swap import swap
from tests.support.scenarios import Scenario, run
from tests.support.shadow import EOS

SHAPES = ((1, 4), (2, 3), (3, 2), (1, 1))  # prompt tokens, output tokens; each fits in 4 slots
# Block size, blocks, and the longest sequence of requests. In (1, 4) a fourth request waits for a
# row or for blocks; (2, 2) has the same 4 slots, (2, 3) has room for one more block.
GEOMETRIES = ((1, 4, 4), (2, 2, 3), (2, 3, 3))
MAX_REQUESTS = 4
Shapes = tuple[tuple[int, int], ...]


@cache
def params(number: int, max_tokens: int) -> RequestParams:
    """Some requests may stop early."""
    return RequestParams(
        max_tokens=max_tokens,
        eos_ids=frozenset({EOS, 1, 2}),
        ignore_eos=number % 3 > 0,
        priority=-number,
        client=str(number % 2),
        sampling=number,
    )


def request(number: int, shape: tuple[int, int], step: int) -> Request:
    """Requests with odd numbers share a prompt, and those with even numbers."""
    num_prompt, max_tokens = shape
    prompt = [number % 2] * num_prompt
    return Request(str(number), prompt, params(number, max_tokens), arrival=float(step))


def arrivals_of(shapes: Shapes, gap: int) -> dict[int, list[Request]]:
    """The requests by the step of their arrival."""
    arrivals: dict[int, list[Request]] = {}
    for number, shape in enumerate(shapes):
        step = number * gap
        arrivals.setdefault(step, []).append(request(number, shape, step))
    return arrivals


def workloads(longest: int) -> Iterator[tuple[Shapes, int]]:
    """Sequences of up to four shapes, and the steps between two arrivals: none or one.

    Of three shapes a quarter of all sequences, and of four, which arrive only together and without
    the shortest shape, a third: all but one of the requests still have every combination of shapes.
    """
    for length in range(1, longest + 1):
        choices = SHAPES[:3] if length == MAX_REQUESTS else SHAPES
        gaps = (0, 1) if 1 < length < MAX_REQUESTS else (0,)
        for places in product(range(len(choices)), repeat=length):
            if length < 3 or sum(places) % len(choices) == 1:
                yield from product([tuple(choices[place] for place in places)], gaps)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_every_small_scenario_ends(name: str, geometry: tuple[int, int, int]) -> None:
    block_size, num_blocks, longest = geometry
    without_host = preset(
        name, block_size=block_size, num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=4
    )
    with_host = replace(without_host, num_host_blocks=2, swap=swap)
    seen: Counter[str] = Counter()
    for async_scheduling in (0, 1):
        for shapes, gap in workloads(longest):
            try:
                counts = run(Scenario(without_host, async_scheduling, arrivals_of(shapes, gap)))
                if counts["preempted, recomputed"]:  # otherwise no block would be swapped
                    counts += run(Scenario(with_host, async_scheduling, arrivals_of(shapes, gap)))
            except Exception as error:
                raise AssertionError(f"{shapes=}, {gap=}, {async_scheduling=}") from error
            seen += counts
    assert not seen["refused"] and seen["cache hits"] and seen["stops in flight"]
