"""All small scenarios under every preset: no step is stuck, every request ends, nothing leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from headway.request import Request, RequestParams
from headway.scheduler import PRESETS, preset
from tests.support.scenarios import Scenario, run
from tests.support.shadow import EOS

SHAPES = ((1, 4), (2, 3), (3, 2), (1, 1))  # prompt tokens, output tokens; each fits in 4 slots
GEOMETRIES = ((1, 4), (2, 2), (2, 3))  # block size, blocks
MAX_REQUESTS = 4


def request(number: int, shape: tuple[int, int], step: int) -> Request:
    """Requests with odd numbers share a prompt, and those with even numbers; some may stop early."""
    num_prompt, max_tokens = shape
    params = RequestParams(
        max_tokens=max_tokens,
        eos_ids=frozenset({EOS, 1, 2}),
        ignore_eos=number % 3 > 0,
        priority=-number,
        client=str(number % 2),
        sampling=number,
    )
    return Request(str(number), [number % 2] * num_prompt, params, arrival=float(step))


def workloads() -> Iterator[dict[int, list[Request]]]:
    """All sequences of up to four shapes, that arrive together or one per step.

    Four arrive only together, and without the shortest shape, to bound the number.
    """
    for length in range(1, MAX_REQUESTS + 1):
        is_longest = length == MAX_REQUESTS
        choices, gaps = (SHAPES[:3], (0,)) if is_longest else (SHAPES, (0, 1))
        for shapes, gap in product(product(choices, repeat=length), gaps):
            arrivals: dict[int, list[Request]] = {}
            for number, shape in enumerate(shapes):
                step = number * gap
                arrivals.setdefault(step, []).append(request(number, shape, step))
            yield arrivals


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_every_small_scenario_ends(name: str, geometry: tuple[int, int]) -> None:
    block_size, num_blocks = geometry
    seen: Counter[str] = Counter()
    for num_host_blocks, async_scheduling in product((0, 2), (0, 1)):
        # With host blocks every victim is swapped, however short it is.
        changes = {"swap": "swap"} if num_host_blocks else {}
        config = preset(
            name, block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks,
            max_num_seqs=3, max_num_batched_tokens=4, **changes,
        )  # fmt: skip
        for number, arrivals in enumerate(workloads()):
            try:
                seen += run(Scenario(config, async_scheduling, arrivals))
            except Exception as error:
                shapes = [(r.num_prompt, r.params.max_tokens) for g in arrivals.values() for r in g]
                raise AssertionError(
                    f"scenario {number}: {shapes} at steps {list(arrivals)}, "
                    f"{async_scheduling=}, {num_host_blocks=}"
                ) from error
    assert not seen["refused"] and seen["cache hits"] and seen["stops in flight"]
