"""Laws of the KV blocks of sliding-window layers, alone and under random policies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from headway import Config, Plan, Scheduler, preset
from headway.errors import ConfigError, RequestTooLong
from headway.kv.cache import KVCache
from headway.kv.window import WindowCache, most_useful_window_blocks, most_window_blocks
from headway.request import Request, RequestParams
from headway.scheduler.policies.presets import describe
from tests.support.drive import Driver
from tests.support.scenarios import Scenario, Tamper, random_scenario, run
from tests.support.shadow import ShadowError

NUM_SEEDS = 100  # each is run with and without a plan in flight
MIN_EVENTS = {
    "preempted, recomputed": 30, "priority preemptions": 10, "cache hits": 60, "full hits": 10,
    "resumed from cache": 10, "split prompts": 100, "aborts in flight": 3,
    "resets while running": 5, "crashes": 3, "multi-step plans": 30,
    "blocked: window_blocks": 60, "finish: stop": 80, "finish: length": 100,
}  # fmt: skip


def test_no_policy_frees_a_block_that_a_token_reads() -> None:
    """Every slot that a windowed layer reads is checked, and every count of holders."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        for async_scheduling in (0, 1):
            try:
                seen += run(random_scenario(seed, async_scheduling, has_window=True))
            except Exception as error:
                raise AssertionError(f"seed {seed}, {async_scheduling}: {error}") from error
    rare = {event: seen[event] for event, least in MIN_EVENTS.items() if seen[event] < least}
    assert not rare, f"too few of these events: {rare}"


def windowed(name: str = "vllm_v1", **changes: Any) -> Driver:
    """Blocks of 4 tokens and a window of 10."""
    numbers: dict[str, Any] = {
        "block_size": 4, "num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "sliding_window": 10, "num_window_blocks": 30,
    }  # fmt: skip
    return Driver(name, **numbers | changes)


@pytest.mark.parametrize("budget", [4, 6, 100])
@pytest.mark.parametrize("max_model_len", [9, 20, 21, 22])
@pytest.mark.parametrize("window", [1, 7, 8, 9, 50])
def test_as_many_blocks_as_are_useful_admit_all_and_one_less_does_not(
    window: int, max_model_len: int, budget: int
) -> None:
    """All rows decode requests of the greatest length; then the longest prompt comes."""

    def last_step(spare: int) -> Plan:
        numbers = {
            "block_size": 4, "max_num_seqs": 3, "max_model_len": max_model_len,
            "max_num_batched_tokens": budget, "headroom": "watermark(0)",
        }  # fmt: skip
        most = most_useful_window_blocks(window, preset("vllm_v1", **numbers))
        driver = windowed(**numbers, sliding_window=window, num_window_blocks=most + spare)
        for id in "ab":
            driver.add(id, 1, max_model_len - 1)
        driver.step()
        driver.add("long", max_model_len - 1, 1)
        return driver.step()

    assert [a.request.id for a in last_step(0).admitted] == ["long"]
    assert [b.reason for b in last_step(-1).blocked] == ["window_blocks"]


def num_held(request: Request) -> int:
    assert request.kv.window is not None
    return len(request.kv.window.blocks)


def window_cache(budget: int) -> WindowCache:
    numbers = {"sliding_window": 10, "num_window_blocks": 30, "block_size": 4}
    return WindowCache(preset("vllm_v1", **numbers, max_num_batched_tokens=budget))


@pytest.mark.parametrize("budget", [1, 4, 6, 100])
@pytest.mark.parametrize("num_known", [1, 8, 9, 30, 60])
def test_a_request_reserves_for_the_tokens_that_it_still_computes(
    num_known: int, budget: int
) -> None:
    """With cached tokens, a plan computes at most the rest of them, or the token budget."""
    cache, request = window_cache(budget), Request("a", range(num_known), RequestParams())
    request.limit = num_known + 1  # one output token: decodes hold no more than the prompt
    for num_computed in range(0, num_known, 4):
        at_once = min(budget, num_known - num_computed)
        most = 0
        for start in range(num_computed, num_known):  # any plan that computes as many as it may
            end = min(start + at_once, num_known)
            most = max(most, -(-end // 4) - max(0, start - 9) // 4)
        assert cache.num_needed(request, num_computed) >= most
        in_window = -(-(10 + at_once - 2) // 4) + 1
        bound = min(-(-num_known // 4), max(in_window, -(-9 // 4) + 1))
        assert cache.num_needed(request, num_computed) <= bound


def test_a_cache_is_in_use_while_a_block_of_a_window_is_held() -> None:
    cache = KVCache(8, 4, 0, window_cache(16))
    assert cache.window is not None and cache.is_unused
    held = cache.window.pool.take(1)
    assert not cache.is_unused
    cache.window.pool.drop(held)
    assert cache.is_unused


def test_a_scheduler_is_idle_only_if_no_block_of_a_window_is_reserved() -> None:
    driver = windowed()
    assert driver.scheduler.is_idle
    driver.add("a", 20, 5)
    driver.step()
    assert not driver.scheduler.kv.is_unused
    driver.run()
    assert driver.scheduler.is_idle


def test_a_long_request_holds_no_more_than_its_window() -> None:
    driver = windowed()
    request = driver.add("a", 40, 50)
    most = []
    while not request.is_finished:
        plan = driver.plan()
        most.append(num_held(request))
        driver.finish(plan)
    # 3 chunks of at most 16 tokens; after the last one the window of 10 needs 4 blocks at most.
    assert max(most[:3]) <= most_window_blocks(10, 4, 90, 16) == 7
    assert max(most[3:]) == most_window_blocks(10, 4, 90, 1) == 4
    assert min(most[3:]) >= 3  # a window of 10 tokens is in 3 blocks at least
    driver.check_empty()


def test_full_layers_keep_all_blocks_meanwhile() -> None:
    driver = windowed()
    request = driver.add("a", 40, 50)
    driver.steps(30)
    assert len(request.kv.blocks) == -(-request.num_computed // 4) > num_held(request)


def test_blocks_that_are_given_back_serve_other_requests() -> None:
    """Four requests of 90 tokens run in 19 blocks; 4 times 23 would be needed without a window."""
    driver = windowed(num_window_blocks=3 * 4 + 7)
    for name in "abcd":
        driver.add(name, 40, 50)
    driver.run()
    assert max(len(row.decodes.split()) for row in driver.table) == 4
    driver.check_outputs()
    driver.check_empty()


def test_a_request_waits_for_blocks_of_the_windowed_layers() -> None:
    driver = windowed(num_window_blocks=9, max_num_batched_tokens=24)
    for name in "abc":
        driver.add(name, 7, 40)
    blocked = driver.step().blocked
    assert [(b.request.id, b.reason, b.need, b.have) for b in blocked] == [
        ("c", "window_blocks", 4, 1)
    ]
    driver.run()
    driver.check_outputs()


def test_a_higher_priority_preempts_for_blocks_of_the_windowed_layers() -> None:
    """Rows, tokens and other blocks are free; one victim's reservation is enough."""
    queue = "priority(aging=0,preempts=True)"
    driver = windowed(num_window_blocks=9, max_num_batched_tokens=24, queue=queue)
    for name in "ab":
        driver.add(name, 7, 40, priority=1)
    driver.steps(3)
    driver.add("c", 7, 40, priority=0)
    plan = driver.step()
    assert [a.request.id for a in plan.admitted] == ["c"]
    assert [p.request.id for p in plan.preempted] == ["b"]
    driver.run()
    driver.check_outputs()


def test_a_hit_needs_the_blocks_of_one_window_only() -> None:
    """The first blocks of the prefix are gone from the windowed layers; that is no miss."""
    driver = windowed(num_window_blocks=12, max_num_batched_tokens=64)
    prompt = list(range(40))
    first = driver.add("a", prompt, 2)
    driver.run()
    driver.add("b", 16, 2)  # evicts the blocks that were given back first
    driver.run()
    window = driver.scheduler.kv.window
    assert window is not None and first.kv.keys[0] not in window.pool.index.block_of
    driver.add("c", [*prompt, 7, 8], 2)
    assert driver.step().admitted[0].num_cached == 40


def test_a_hit_needs_all_blocks_of_the_window() -> None:
    """The window of 10 tokens is in the last 3 of 10 blocks, and one of the 3 is gone."""
    driver = windowed(num_window_blocks=12, max_num_batched_tokens=64)
    prompt = list(range(40))
    first = driver.add("a", prompt, 2)
    driver.run()
    driver.add("b", 40, 1)  # takes 2 blank blocks and 8 cached ones
    driver.run()
    window = driver.scheduler.kv.window
    assert window is not None
    assert [key in window.pool.index.block_of for key in first.kv.keys[7:]] == [False, True, True]
    driver.add("c", [*prompt, 7, 8], 2)
    assert driver.step().admitted[0].num_cached == 0


def test_a_prefix_whose_window_was_evicted_is_computed_again() -> None:
    driver = windowed(num_window_blocks=10, max_num_batched_tokens=32)
    prompt = list(range(36))
    driver.add("a", prompt, 2)
    driver.run()
    driver.add("b", 36, 2)  # takes all blocks of the windowed layers
    driver.run()
    again = driver.add("c", [*prompt, 7], 2)
    admission = driver.step().admitted[0]
    index = driver.scheduler.kv.pool.index
    assert index.match(again.kv.keys) == 9  # the other layers still have it
    assert admission.num_cached < 36
    driver.run()
    driver.check_outputs()


def test_a_request_that_never_fits_is_refused() -> None:
    scheduler = Scheduler(windowed(num_window_blocks=6).scheduler.config)
    with pytest.raises(RequestTooLong, match=r"needs 7 KV blocks of the sliding-window.* is 6"):
        scheduler.add(Request("a", range(40), RequestParams(max_tokens=9)))
    scheduler.add(Request("b", range(20), RequestParams(max_tokens=4)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 8, "num_window_blocks": 0}, "num_window_blocks is 0"),
        ({"sliding_window": 0, "num_window_blocks": 8}, "sliding_window is 0"),
        ({"sliding_window": -1, "num_window_blocks": 8}, "sliding_window"),
        ({"num_host_blocks": 5}, "num_host_blocks is 5"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        windowed(**changes)


def test_a_described_config_is_restored() -> None:
    config = windowed().scheduler.config
    described = describe(config)
    assert described["sliding_window"] == 10 and preset(**described) == config
    assert "sliding_window" not in describe(preset())


def test_the_budget_of_a_windowed_model_is_fixed() -> None:
    scheduler = windowed().scheduler
    with pytest.raises(ConfigError, match="max_num_batched_tokens cannot change"):
        scheduler.reconfigure(windowed(max_num_batched_tokens=17).scheduler.config)
    scheduler.reconfigure(windowed(victim="least_work").scheduler.config)


# The checks above detect plans with one error.


def forget_window_blocks(plan: Plan, scheduler: Scheduler) -> None:
    plan.window_blocks.clear()


def give_back_too_early(plan: Plan, scheduler: Scheduler) -> None:
    """Drop a block that the next token still reads."""
    for request in plan.decodes:
        held, cache = request.kv.window, scheduler.kv.window
        if held is not None and cache is not None and len(held.blocks) > 2:
            cache.pool.drop(held.blocks[:2])
            del held.blocks[:2]
            held.first += 2
            return


def keep_a_block(plan: Plan, scheduler: Scheduler) -> None:
    """Hold a block twice, as if one had not been given back."""
    for request in plan.decodes:
        if request.kv.window is not None and scheduler.kv.window is not None:
            scheduler.kv.window.pool.share(request.kv.window.blocks[:1])


@pytest.mark.parametrize("tamper", [forget_window_blocks, give_back_too_early, keep_a_block])
def test_a_wrong_plan_is_detected(tamper: Tamper) -> None:
    config: Config = windowed(num_window_blocks=19).scheduler.config
    requests = [
        Request(str(n), [n] * 30, RequestParams(max_tokens=40, sampling=n)) for n in range(4)
    ]
    run(Scenario(config, 0, {0: list(map(_copy, requests))}))
    with pytest.raises((ShadowError, AssertionError)):
        run(Scenario(config, 0, {0: requests}), tamper)


def _copy(request: Request) -> Request:
    return Request(request.id, request.prompt, request.params)
