"""Preset nano_vllm against the later version of nano-vLLM: shared prefixes, few blocks."""

from __future__ import annotations

from collections import Counter

from tests.scheduler.reference.attribution import causes, later_pair
from tests.scheduler.reference.compare import crowded_workload
from tests.scheduler.reference.nano_vllm_later import LATER_NANO_VLLM
from tests.support.drive import Row, small_driver

NUM_WORKLOADS = 200
NUM_EXPLAINED = 60


def test_with_the_named_differences_every_step_is_the_same() -> None:
    seen = Counter[str]()
    for seed in range(NUM_WORKLOADS):
        both = later_pair(crowded_workload(seed), LATER_NANO_VLLM)
        problem = both.run()
        assert problem is None, f"workload {seed}, {problem}: {both.workload}"
        seen += both.seen
    least = {"preemptions": 150, "cache hits": 250, "hits after preemption": 100}
    assert all(seen[event] >= num for event, num in least.items()), seen


def test_every_workload_that_differs_has_a_named_cause() -> None:
    found = Counter(causes(crowded_workload(seed)) for seed in range(NUM_EXPLAINED))
    assert () not in found
    assert found[None] < NUM_EXPLAINED / 2
    named = {name for names in found if names for name in names}
    assert {"same step", "last block", "block size 1", "running limit"} <= named


def test_a_reused_block_is_no_hit_for_the_prefix_it_had() -> None:
    """Early nano-vLLM compares only the tokens of a block, not those before them."""
    driver = small_driver("nano_vllm", num_blocks=3, block_size=2)
    driver.add("a", [1, 1, 2, 2, 9], 1)
    driver.step()
    driver.add("b", [3, 3, 2, 2], 1)  # takes the second block of a, for the same two tokens
    driver.step()
    driver.add("c", [1, 1, 2, 2, 9], 1)
    assert driver.steps(1) == [Row("c", "", (("c", 2, 5),))]
