"""The decisions of each ready-made policy, by slot: chunk, queue, victim, headroom, swap."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway import Plan, SchedulerView
from headway.request import Request, RequestParams
from headway.scheduler.policies import headroom
from headway.scheduler.policies.chunk import at_most, split_any, split_first, whole
from headway.scheduler.policies.swap import recompute, swap, swap_if_cheaper  # fmt: skip
from tests.support.drive import Driver, Row, small_driver


@pytest.mark.parametrize(
    ("rule", "first_fits", "first_too_long", "later_too_long"),
    [(whole, 5, 0, 0), (split_first, 5, 8, 0), (split_any, 5, 8, 8), (at_most(3), 3, 3, 3)],
)
def test_chunk_rules(rule: Any, first_fits: int, first_too_long: int, later_too_long: int) -> None:
    assert rule(5, 8, True) == first_fits
    assert rule(12, 8, True) == first_too_long
    assert rule(12, 8, False) == later_too_long


@pytest.mark.parametrize(
    ("chunk", "first_step"),
    [
        ("whole", (("a", 0, 5),)),  # b, 7 tokens, does not fit in the 3 left
        ("split_first", (("a", 0, 5),)),
        ("split_any", (("a", 0, 5), ("b", 0, 3))),
        ("at_most(2)", (("a", 0, 2), ("b", 0, 2), ("c", 0, 2))),  # partial prefills share a step
    ],
)
def test_chunk_rules_in_a_step(chunk: str, first_step: tuple[tuple[str, int, int], ...]) -> None:
    driver = small_driver("vllm_v1", chunk=chunk, num_blocks=32, max_num_batched_tokens=8)
    driver.add_all(a=(5, 1), b=(7, 1), c=(3, 1))
    assert driver.steps(1)[0].chunks == first_step
    driver.run()


def order_of_service(queue: str, *requests: dict[str, Any]) -> list[str]:
    """Ids in the order in which requests that arrive together run, one at a time."""
    driver = small_driver("vllm_v1", queue=queue, max_num_seqs=1, num_blocks=64)
    for request in requests:
        driver.add(**{"prompt": 4, "max_tokens": 1, **request})
    return [row.admitted for row in driver.run()]


def test_fcfs_serves_by_arrival_and_ties_in_the_order_added() -> None:
    requests = [
        {"id": id, "arrival": arrival} for id, arrival in (("a", 2.0), ("b", 1.0), ("c", 1.0))
    ]
    assert order_of_service("fcfs", *requests) == ["b", "c", "a"]


def test_priority_serves_lower_numbers_first_and_ties_by_arrival() -> None:
    assert order_of_service(
        "priority", {"id": "a", "priority": 1}, {"id": "b", "priority": 0, "arrival": 5.0},
        {"id": "c", "priority": 0, "arrival": 4.0}, {"id": "d", "priority": -1, "arrival": 9.0},
    ) == ["d", "c", "b", "a"]  # fmt: skip


def test_aging_lets_a_long_wait_outweigh_a_priority_level() -> None:
    late = {"id": "late", "priority": 0, "arrival": 21.0}
    early = {"id": "early", "priority": 2, "arrival": 0.0}
    assert order_of_service("priority(aging=10.0)", late, early) == ["early", "late"]
    assert order_of_service("priority(aging=11.0)", late, early) == ["late", "early"]
    assert order_of_service("priority", late, early) == ["late", "early"]


def test_shortest_first_counts_tokens_left_after_cache_hits() -> None:
    driver = small_driver(
        "vllm_v1", queue="shortest_first(aging=1.0)", max_num_seqs=1, num_blocks=64
    )
    prompt = list(range(40))
    driver.add("warm", prompt, 1)
    driver.run()
    driver.add("short", 8, 1)
    driver.add("long but cached", [*prompt, 40], 1)  # 1 token left to compute
    driver.add("shorter", 4, 1)
    assert [row.admitted for row in driver.run()] == ["long but cached", "shorter", "short"]


def test_shortest_first_does_not_starve_a_long_prompt() -> None:
    assert order_of_service(
        "shortest_first(aging=0.5)", {"id": "long", "prompt": 24}, {"id": "a", "arrival": 9.0},
        {"id": "b", "arrival": 11.0},
    ) == ["a", "long", "b"]  # fmt: skip  # 12, 9 + 2, 11 + 2


def test_fair_serves_the_client_with_the_least_service() -> None:
    heavy = [{"id": f"h{n}", "client": "heavy", "prompt": 12} for n in range(3)]
    light = [{"id": f"l{n}", "client": "light", "prompt": 4, "arrival": 1.0} for n in range(3)]
    # A request costs its prompt + 2 for one output token: heavy 14, then light 6, 12, 18, heavy 28.
    assert order_of_service("fair", *heavy, *light) == ["h0", "l0", "l1", "l2", "h1", "h2"]


def test_deadline_serves_the_earliest_and_gives_requests_without_one_a_slack() -> None:
    assert order_of_service(
        "earliest_deadline(slack=60.0)", {"id": "none", "arrival": 0.0}, {"id": "soon", "deadline": 10.0},
        {"id": "late", "deadline": 90.0},
    ) == ["soon", "none", "late"]  # fmt: skip


def full_batch(**changes: Any) -> Driver:
    """A driver with two rows, both taken by requests of low priority."""
    queue = changes.pop("queue", "priority(preempts=True)")
    driver = small_driver(
        "vllm_v1", queue=queue, victim="served_last", max_num_seqs=2, num_blocks=32
    )
    driver.add("x", 4, 40, priority=5)
    driver.add("y", 4, 40, priority=6)
    driver.step()
    return driver


def test_a_waiting_high_priority_preempts_the_lowest_running_one() -> None:
    driver = full_batch()
    driver.add("urgent", 4, 2, priority=0)
    plan = driver.step()
    assert driver.table[-1] == Row("urgent", "x", (("urgent", 0, 4),), "y", ())
    assert plan.preempted[0].is_priority
    driver.step()  # urgent has its two tokens
    assert driver.steps(1)[0].admitted == "y"


def test_no_priority_preemption_with_a_free_row() -> None:
    driver = small_driver("vllm_v1", queue="priority(preempts=True)", max_num_seqs=3, num_blocks=32)
    driver.add("x", 4, 40, priority=5)
    driver.add("y", 4, 40, priority=6)
    driver.step()
    driver.add("urgent", 4, 2, priority=0)
    assert driver.steps(1)[0] == Row("urgent", "x y", (("urgent", 0, 4),))


def test_equal_priorities_never_preempt_each_other() -> None:
    driver = full_batch()
    driver.add("peer", 4, 2, priority=6)
    assert driver.steps(1)[0] == Row("", "x y")


def test_without_preempts_a_high_priority_waits_for_a_row() -> None:
    driver = full_batch(queue="priority")
    driver.add("urgent", 4, 2, priority=0)
    assert driver.steps(1)[0] == Row("", "x y")


def test_no_request_is_preempted_more_than_max_preemptions_times() -> None:
    driver = full_batch(queue="priority(preempts=True, max_preemptions=2)")
    for number in range(6):
        driver.add(f"urgent{number}", 4, 2, priority=0)
        driver.steps(3)
    driver.run()
    assert driver.requests["y"].history.num_priority_preemptions == 2
    assert driver.requests["x"].history.num_priority_preemptions <= 2
    assert all(request.finish_reason == "length" for request in driver.requests.values())


def test_no_priority_preemption_if_it_would_not_be_enough() -> None:
    driver = small_driver("vllm_v1", queue="priority(preempts=True)", max_num_seqs=4, num_blocks=8)
    driver.add("peer", 20, 12, priority=0)
    driver.add("low", 4, 4, priority=5)
    driver.step()
    # 3 blocks; 2 are free, and low holds 1 and needs another
    driver.add("urgent", 12, 2, priority=0)
    row = driver.steps(1)[0]
    assert row.preempted == "" or row.admitted == "urgent"


def preempted_by(victim: str, *, shared: int = 0) -> str:
    """The id that the rule chooses of three running requests."""
    driver = small_driver("vllm_v1", victim=victim, num_blocks=64, max_num_seqs=3, queue="priority")
    common = list(range(shared))
    driver.add("a", [*common, *range(100, 108)], 20, priority=2)
    driver.step()
    driver.add("b", [*common, *range(200, 212)], 20, priority=3)
    driver.add("c", range(300, 316), 20, priority=1)
    driver.step()
    scheduler = driver.scheduler
    return max(scheduler.running, key=lambda r: scheduler.config.victim(r, scheduler.state.view)).id


@pytest.mark.parametrize(
    ("victim", "chosen"),
    [
        ("newest", "b"),  # c, with priority 1, was admitted before b, with priority 3
        ("least_work", "a"),  # 9 tokens are computed, against 12 and 16
        ("fewest_generated", "c"),  # one token, as b has, and it arrived later; a has two
        ("lowest_priority", "b"),
        ("served_last", "b"),  # the queue sorts by priority
        ("fewest_private_blocks", "b"),  # 3 private blocks, as a has, and it arrived later
    ],
)
def test_victim_rules(victim: str, chosen: str) -> None:
    assert preempted_by(victim) == chosen


def test_fewest_lost_counts_only_private_blocks() -> None:
    # a: 16 + 9 tokens in 7 blocks; b: 16 + 12 tokens in 7 blocks; 4 of them are shared. c: 4 blocks.
    assert preempted_by("fewest_private_blocks", shared=16) == "b"


def test_served_last_follows_arrival_under_fcfs_even_after_a_resume() -> None:
    driver = small_driver("vllm_v1", victim="served_last", num_blocks=4)
    driver.add("old", 4, 9, arrival=0.0)
    driver.add("young", 4, 9, arrival=1.0)
    driver.run()
    assert driver.requests["old"].history.num_preemptions == 0
    assert driver.requests["young"].history.num_preemptions > 0


def headroom_of(headroom: str, *, num_preemptions: int = 0, num_blocks: int = 100) -> int:
    """The headroom for a request of 5 tokens that may store 4 more, with another running."""
    driver = small_driver("vllm_v1", headroom=headroom, num_blocks=num_blocks)
    driver.add("running", 8, 9)  # stores 8 tokens now and 16 at its end
    driver.plan()
    driver.scheduler.state.outputs.pressure = float(num_preemptions)
    waiting = Request("waiting", range(5), RequestParams(max_tokens=5))
    waiting.limit = 10
    return driver.scheduler.config.headroom(waiting, driver.scheduler.state.view)


@pytest.mark.parametrize(
    ("headroom", "expected"),
    [
        ("watermark(0.0)", 0),
        ("watermark(0.05)", 5),
        ("reserve_outputs(1.0)", 2 + 1),  # 8 more tokens and 4 more tokens
        ("reserve_outputs(0.5)", 2),  # half of 3, rounded up
        ("back_off(watermark(0.05), share=0.02)", 5),
    ],
)
def test_headroom_rules(headroom: str, expected: int) -> None:
    assert headroom_of(headroom) == expected


def test_future_peak_asks_for_the_blocks_of_the_fullest_later_step() -> None:
    # In 4 steps: 12 and 9 tokens in 6 blocks; 4 of them are allocated now.
    assert headroom_of("future_peak", num_blocks=7) == 2
    assert headroom_of("future_peak(margin=0.3)", num_blocks=7) == 2 + 2
    assert 2 <= headroom_of("future_peak") <= 100 - 4  # an upper bound if everything fits


def test_back_off_asks_for_its_share_per_recent_preemption() -> None:
    assert headroom_of("back_off(watermark(0.05), share=0.02)", num_preemptions=3) == 5 + 6


def test_a_single_request_runs_whatever_the_headroom() -> None:
    driver = small_driver("vllm", headroom="watermark(0.9)", num_blocks=8)
    driver.add("a", 29, 4)  # all 8 blocks
    assert driver.steps(1)[0].admitted == "a"


EXACT = ["reserve_outputs(1.0)", "future_peak"]


def seeds_with_preemptions(
    headroom: str, batching: str, max_tokens: int, num_shared: int
) -> list[int]:
    """Seeds with which a headroom rule preempts although every output reaches max_tokens."""
    failed = []
    for seed in range(16):
        size = 1 + seed % 5
        most = (12 + seed) * size
        driver = small_driver(
            "vllm_v1", batching=batching, headroom=headroom, num_blocks=12 + seed, block_size=size,
            max_num_batched_tokens=max_tokens, max_num_seqs=6,
        )  # fmt: skip
        for number in range(12):
            length = 1 + (7 * number + seed) % (most // 2)
            own = range(1000 * (number + 1), 1000 * (number + 1) + length)
            prompt = [*range(num_shared), *own][:length]
            driver.add(str(number), prompt, 1 + (5 * number + 3 * seed) % (most // 2))
        if any(row.preempted for row in driver.run()):
            failed.append(seed)
    return failed


@pytest.mark.parametrize("batching", ["mixed", "prefill_first", "static"])
@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts(batching: str, headroom: str) -> None:
    assert seeds_with_preemptions(headroom, batching, max_tokens=512, num_shared=0) == []


@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts_with_split_prompts(headroom: str) -> None:
    assert seeds_with_preemptions(headroom, "mixed", max_tokens=8, num_shared=0) == []


@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts_with_shared_prefixes(headroom: str) -> None:
    assert seeds_with_preemptions(headroom, "mixed", max_tokens=512, num_shared=16) == []


class PrivateBlocks:
    """A view in which every request has this number of private blocks."""

    block_size = 4

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def num_private_blocks(self, request: Request) -> int:
        return self._num_blocks


def test_swap_rules() -> None:
    request = Request("a", range(40), RequestParams())
    request.computed_base = 40
    view: Any = PrivateBlocks(10)
    assert not recompute(request, view)
    assert swap(request, view)
    # Two starts of 100 us and 2 us per token, against 24 us per token: cheaper from 10 tokens on.
    assert swap_if_cheaper()(request, view)
    assert not swap_if_cheaper()(request, PrivateBlocks(2))  # type: ignore[arg-type]
    assert swap_if_cheaper()(request, PrivateBlocks(3))  # type: ignore[arg-type]
    assert not swap_if_cheaper(copy=1e-4)(request, view)


@pytest.mark.parametrize("num_private", [1, 4, 10])
def test_cheaper_counts_attention_to_all_earlier_tokens(num_private: int) -> None:
    """Recomputed tokens attend to all tokens before them, also to those in shared blocks."""
    request = Request("a", range(40), RequestParams())
    request.computed_base = 40
    tokens = 4 * num_private
    pairs = sum(place + 0.5 for place in range(40 - tokens, 40))
    copies = 2 * 1e-3 * tokens
    for pair, is_cheaper in ((1.01 * copies / pairs, True), (0.99 * copies / pairs, False)):
        rule = swap_if_cheaper(copy=1e-3, compute=0.0, start=0.0, pair=pair)
        assert rule(request, PrivateBlocks(num_private)) == is_cheaper  # type: ignore[arg-type]


def preempting_plan(num_host_blocks: int) -> Plan:
    driver = small_driver("vllm", swap="swap", num_blocks=6, num_host_blocks=num_host_blocks)
    driver.add_all(a=(10, 5), b=(10, 4))
    driver.steps(3)
    plan = driver.step()
    driver.run()
    driver.check_empty()
    return plan


def test_swap_falls_back_to_recompute_when_the_host_is_full() -> None:
    assert preempting_plan(3).preempted[0].is_swap
    assert not preempting_plan(2).preempted[0].is_swap


class Full:
    """A view in which no block is free, so that `future_peak` computes its estimate."""

    def __init__(self, view: SchedulerView) -> None:
        self._view, self.num_free = view, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class Ample(Full):
    """A view with enough free blocks that `future_peak` takes its shortcut."""

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        self.num_free = 1 << 20


def test_the_shortcut_of_future_peak_is_never_below_its_estimate() -> None:
    """Also for requests that were preempted before; they have been partially computed."""
    rule, num_resumed = headroom.future_peak(), 0
    for seed in range(12):
        rng = random.Random(seed)
        driver = small_driver("vllm_v1", num_blocks=24, max_num_seqs=6)
        for number in range(8):
            driver.add(f"r{number}", rng.randint(4, 24), rng.randint(8, 40))
        while driver.scheduler.requests:
            driver.step()
            view = driver.scheduler.state.view
            for request in driver.scheduler.queue:
                num_resumed += request.history.num_preemptions > 1
                assert rule(request, Ample(view)) >= rule(request, Full(view)), request
    assert num_resumed > 20
