"""Step tables of every preset, derived by hand, and the decisions of each ready-made policy.

A row lists one step: admitted, decodes, chunks (id, start, end), preempted, blocked (id, reason).
Blocks hold four tokens unless a test changes it.
"""

from __future__ import annotations

from typing import Any

import pytest

from headway.plan import Blocked, NotConsidered, Plan
from headway.request import Params, Request, State
from headway.scheduler import PRESETS
from headway.scheduler.policies import (
    at_most,
    cheaper,
    recompute,
    split_any,
    split_first,
    swap,
    whole,
)  # fmt: skip
from tests.support.drive import Driver, Row


def make_driver(name: str, **changes: Any) -> Driver:
    return Driver(
        name, **{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    )


def order_of_service(queue: str, *requests: dict[str, Any]) -> list[str]:
    """Ids in the order in which requests that arrive together run, one at a time."""
    driver = make_driver("vllm_v1", queue=queue, max_num_seqs=1, num_blocks=64)
    for request in requests:
        driver.add(**{"prompt": 4, "max_tokens": 1, **request})
    return [row.admitted for row in driver.run()]


# nano_vllm


def test_nano_vllm_runs_all_prefill_or_all_decode_with_prefill_first() -> None:
    driver = make_driver("nano_vllm", num_blocks=6, max_num_seqs=3, max_num_batched_tokens=8)
    driver.add("a", 6, 3)
    driver.add("b", 4, 4)
    driver.add("c", 3, 3)
    assert driver.run() == [
        # a takes 6 of 8 tokens; b needs 4, 2 are left, and only the first prompt may be split
        Row("a", "", (("a", 0, 6),), "", (("b", "token_budget"),)),
        Row("b c", "", (("b", 0, 4), ("c", 0, 3))),  # prompts run before the next token of a
        Row("", "a b c"),  # b needs its second block
        Row("", "a b c"),  # a gets its third and last token; c takes the last block
        Row("", "b"),  # c is finished too: its first token came with its prompt
    ]
    driver.check_empty()


def test_nano_vllm_preempts_the_newest_and_resumes_it_before_later_arrivals() -> None:
    driver = make_driver("nano_vllm", num_blocks=3)
    driver.add("a", 4, 6)
    driver.add("b", 4, 4)
    assert driver.steps(2) == [
        Row("a b", "", (("a", 0, 4), ("b", 0, 4))),  # one block is left
        Row("", "a", (), "b"),  # both need a new block: the newest is preempted
    ]
    driver.add("c", 4, 1)
    needs_two = (("b", "blocks"),)  # its 5 tokens need 2 blocks, 1 is free; c waits behind it
    assert driver.run() == [
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),  # a reuses the cached block of b, and ends
        Row("b c", "", (("b", 0, 5), ("c", 0, 4))),  # b is recomputed, prompt and output
        Row("", "b"),
        Row("", "b"),
    ]
    driver.check_empty()


def test_nano_vllm_splits_only_the_first_prompt_of_a_batch() -> None:
    driver = make_driver("nano_vllm", num_blocks=16, max_num_batched_tokens=8)
    driver.add("a", 12, 2)
    driver.add("b", 9, 1)
    driver.add("c", 2, 1)
    assert driver.run() == [
        Row(
            "a", "", (("a", 0, 8),), "", ()
        ),  # the budget is used up: no other request is considered
        Row(
            "", "", (("a", 8, 12),), "", (("b", "token_budget"),)
        ),  # 4 tokens are left; the 9 of b are not split
        Row("b", "", (("b", 0, 8),)),  # b is the first prompt now
        Row("c", "", (("b", 8, 9), ("c", 0, 2))),
        Row("", "a"),
    ]


def test_nano_vllm_charges_only_the_uncached_part_of_a_prompt() -> None:
    driver = make_driver("nano_vllm", num_blocks=16, max_num_batched_tokens=10)
    prompt = list(range(8))
    driver.add("a", prompt, 1)
    driver.step()
    driver.add("b", [*prompt, 8], 1)
    driver.add("c", 9, 1)
    assert driver.steps(1) == [Row("b c", "", (("b", 8, 9), ("c", 0, 9)))]


# deep_dive


def test_deep_dive_admits_a_request_only_if_the_batch_can_finish() -> None:
    driver = make_driver("deep_dive", num_blocks=6)
    for name in "abc":
        driver.add(name, 4, 9)  # stores 12 tokens: 3 blocks each
    # a and b need 1 block each now and 2 each later: all 6. c needs 1 + 6, and 4 are free.
    first = driver.step()
    assert first.blocked == [Blocked(driver.requests["c"], "headroom", 7, 4)]
    assert driver.table[0] == Row("a b", "", (("a", 0, 4), ("b", 0, 4)), "", (("c", "headroom"),))
    rows = driver.run()
    assert [row.decodes for row in rows[:8]] == ["a b"] * 8
    assert rows[8] == Row("c", "", (("c", 0, 4),))  # a and b are finished
    assert not any(row.preempted for row in rows)

    other = make_driver("vllm_v1", num_blocks=6)
    for name in "abc":
        other.add(name, 4, 9)
    assert any(row.preempted for row in other.run())


def test_deep_dive_mixes_prefill_and_decode() -> None:
    driver = make_driver("deep_dive", num_blocks=16)
    driver.add("a", 3, 4)
    driver.step()
    driver.add("b", 5, 2)
    assert driver.steps(3) == [
        Row("b", "a", (("b", 0, 5),)),
        Row("", "a b"),  # b is finished
        Row("", "a"),
    ]


def test_deep_dive_reuses_the_blocks_of_a_finished_request_in_the_next_step() -> None:
    driver = make_driver("deep_dive", num_blocks=2)
    driver.add("a", 8, 1)
    driver.add("b", 8, 1)
    assert [row.admitted for row in driver.run()] == ["a", "b"]


def test_deep_dive_uses_the_four_states() -> None:
    driver = make_driver("deep_dive", num_blocks=8, max_num_batched_tokens=4)
    a = driver.add("a", 6, 2)
    states = [a.state]
    for _ in range(3):
        plan = driver.plan()
        states.append(a.state)
        driver.finish(plan)
    states.append(a.state)
    waiting, prefill, decoding, finished = (
        State.WAITING, State.PREFILL, State.DECODING, State.FINISHED,
    )  # fmt: skip
    assert states == [waiting, prefill, decoding, decoding, finished]


# vllm and vllm_v1


@pytest.mark.parametrize("name", ["vllm", "vllm_v1"])
def test_vllm_fills_its_token_budget(name: str) -> None:
    driver = Driver(name)
    for number in range(120):
        driver.add(f"d{number}", [number], 100)
    driver.step()
    driver.add("p", 4096, 4)
    driver.add("q", 5000, 4)
    driver.add("r", 10, 4)
    plan = driver.step()
    assert len(plan.decodes) == 120  # 8072 of 8192 tokens are left
    assert driver.table[-1].chunks == (("p", 0, 4096), ("q", 0, 3976))  # 3976 are left, then 0
    assert plan.num_tokens == 8192
    assert plan.not_considered == NotConsidered("token_budget", 1)
    plan = driver.step()
    assert len(plan.decodes) == 121
    assert driver.table[-1].chunks == (("q", 3976, 5000), ("r", 0, 10))


def test_vllm_swaps_the_newest_out_and_resumes_it_before_new_prompts() -> None:
    driver = make_driver("vllm", num_blocks=6, num_host_blocks=6)
    driver.add("a", 10, 5)
    b = driver.add("b", 10, 4)
    assert driver.steps(3) == [
        Row("a b", "", (("a", 0, 10), ("b", 0, 10))),  # 3 blocks each: none is free
        Row("", "a b"),
        Row("", "a b"),  # 12 tokens are stored each: the blocks are full
    ]
    plan = driver.step()  # both need a block; copying 12 tokens is cheaper than recomputing them
    assert driver.table[-1] == Row("", "a", (), "b", ())
    assert plan.events.preempted[0].is_swap and len(plan.copies_out) == 3
    assert plan.not_considered == NotConsidered(
        "back_off", 1
    )  # a step that preempts for blocks admits no request
    assert b.state is State.SWAPPED
    driver.add("c", 2, 1)
    assert driver.steps(1) == [
        Row("", "a", (), "", (("b", "blocks"),)),  # b needs 4, 2 are free; a ends
    ]
    plan = driver.step()
    assert driver.table[-1] == Row("b c", "", (("b", 12, 13), ("c", 0, 2)))
    # The first two blocks are still on the device. The third was reused: it comes from the host.
    assert plan.admitted[0][1:] == (8, 4, True) and len(plan.copies_in) == 1
    driver.check_empty()


def swapped_b_and_urgent_c(recipe: str) -> Row:
    driver = make_driver(
        "vllm", recipe=recipe, queue="priority", swap="swap", num_blocks=6, num_host_blocks=6
    )
    driver.add("a", 10, 5)
    driver.add("b", 10, 4)
    driver.steps(5)  # as above: b is on the host, a is finished
    driver.add("c", 20, 1, priority=-1)
    return driver.steps(1)[0]


def test_swapped_first_resumes_a_swapped_request_before_a_higher_priority() -> None:
    assert swapped_b_and_urgent_c("swapped_first").admitted == "b"
    assert swapped_b_and_urgent_c("mixed").admitted == "c"


def test_vllm_keeps_a_share_of_blocks_free_at_admission() -> None:
    driver = make_driver("vllm", headroom="watermark(0.5)", num_blocks=8)
    driver.add("a", 4, 2)
    b = driver.add("b", 16, 2)
    plan = driver.step()
    assert plan.blocked == [Blocked(b, "headroom", 4 + 4, 7)]  # 4 blocks, and 4 that stay free
    other = make_driver("vllm", headroom="watermark(0.5)", num_blocks=8)
    other.add("a", 4, 2)
    other.add("b", 12, 2)  # 3 and 4 of 7
    assert other.step().blocked == []


def test_vllm_backs_off_for_22_steps_after_a_preemption() -> None:
    driver = make_driver(
        "vllm", headroom="back_off(watermark(0.0), share=0.25)", block_size=32, num_blocks=8,
        max_num_batched_tokens=512,
    )  # fmt: skip
    driver.add("a", 96, 60)
    driver.add("c", 30, 3)
    b = driver.add("b", 100, 8)
    assert driver.steps(3) == [
        Row(
            "a c b", "", (("a", 0, 96), ("c", 0, 30), ("b", 0, 100))
        ),  # 3 + 1 + 4 blocks: none is free
        Row("", "a c", (), "b"),  # a needs another block
        Row("", "a c", (), "", (("b", "blocks"),)),  # needs 4, 3 are free; c ends
    ]
    # Now 4 are free. The preemption counts 0.25 of 8 blocks and decays by 3 % per step: the rule
    # asks for one more block until 2 * 0.97 ** n < 1, that is for 22 steps.
    plan = driver.step()
    assert plan.blocked == [Blocked(b, "back_off", 5, 4)]
    rows = driver.steps(21)
    assert [row.blocked for row in rows[:20]] == [(("b", "back_off"),)] * 20
    assert rows[20] == Row("b", "a", (("b", 96, 101),))  # its three full blocks are still cached


def test_vllm_v1_preempts_by_recompute_and_never_swaps() -> None:
    driver = make_driver("vllm_v1", num_blocks=6, num_host_blocks=6)
    driver.add("a", 10, 5)
    driver.add("b", 10, 4)
    driver.run()
    assert [row.preempted for row in driver.table if row.preempted] == ["b"]
    assert driver.requests["b"].history.num_preemptions == 1
    # b had stored 12 tokens; its last block was reused; its first two blocks are hits.
    assert driver.table[-1] == Row("b", "", (("b", 8, 13),))
    assert driver.requests["b"].history.num_recomputed == 4


# minivllm


def test_minivllm_defers_decodes_over_the_token_budget_oldest_first() -> None:
    driver = make_driver("minivllm", num_blocks=16, max_num_seqs=8, max_num_batched_tokens=6)
    for number in range(8):
        driver.add(str(number), 2, 3)
    rows = driver.steps(3)
    assert [row.admitted for row in rows] == ["0 1 2", "3 4 5", "6 7"]
    plan = driver.step()
    assert driver.table[-1].decodes == "0 1 2 3 4 5"
    assert [request.id for request in plan.deferred] == ["6", "7"]
    # The oldest run first, as in the deque of minivllm; they have their three tokens now.
    assert [row.decodes for row in driver.run()] == ["0 1 2 3 4 5", "6 7", "6 7"]


def test_minivllm_charges_cached_tokens_too_and_reports_the_shortage() -> None:
    driver = make_driver("minivllm", num_blocks=32, max_num_batched_tokens=10)
    prompt = list(range(8))
    driver.add("a", prompt, 1)
    driver.step()
    driver.add("b", [*prompt, 8], 1)
    c = driver.add("c", 2, 1)
    plan = driver.step()  # b computes 1 token and is charged for 9
    assert driver.table[-1] == Row("b", "", (("b", 8, 9),), "", (("c", "token_budget"),))
    assert plan.blocked == [Blocked(c, "token_budget", 2, 1)]
    driver.run()
    driver.add("d", 3, 1)
    driver.add("e", [*prompt, 8], 1)
    plan = driver.step()
    assert driver.table[-1] == Row("d", "", (("d", 0, 3),), "", (("e", "token_budget"),))
    assert plan.blocked[0][2:] == (9, 7)  # the 9 tokens charged, not the 1 token computed


def test_minivllm_stops_at_max_model_len() -> None:
    driver = make_driver("minivllm", num_blocks=16, max_model_len=10)
    a = driver.add("a", 7, None)
    b = driver.add("b", 7, 100)
    driver.run()
    assert len(a.tokens) == len(b.tokens) == 10
    assert a.finish_reason == b.finish_reason == "length"


# static


def test_static_finishes_a_batch_before_the_next() -> None:
    driver = make_driver("static", num_blocks=32, max_num_seqs=2)
    driver.add("a", 2, 2)
    driver.add("b", 2, 4)
    driver.add("c", 2, 1)
    assert driver.run() == [
        Row("a b", "", (("a", 0, 2), ("b", 0, 2))),
        Row("", "a b"),  # a is finished
        Row("", "b"),  # c waits although a row is free
        Row("", "b"),
        Row("c", "", (("c", 0, 2),)),
    ]


def test_static_fills_a_batch_over_several_prefill_steps() -> None:
    driver = make_driver("static", num_blocks=32, max_num_seqs=4, max_num_batched_tokens=4)
    for name in "abcde":
        driver.add(name, 3, 2)
    rows = driver.run()
    assert rows[:4] == [
        Row("a b", "", (("a", 0, 3), ("b", 0, 1))),
        Row("c", "", (("b", 1, 3), ("c", 0, 2))),
        Row("d", "", (("c", 2, 3), ("d", 0, 3))),
        Row("", "a b c d"),
    ]
    assert [row.admitted for row in rows[4:]] == ["e", ""]


def utilisation(name: str, outputs: list[int], max_num_seqs: int) -> float:
    """Mean share of rows in use; for continuous batching only while requests wait."""
    driver = Driver(name, num_blocks=4096, max_num_seqs=max_num_seqs, headroom="watermark(0.0)")
    for number, output in enumerate(outputs):
        driver.add(str(number), 8, output)
    shares = []
    while driver.scheduler.requests:
        plan = driver.plan()
        shares.append(plan.events.num_running / max_num_seqs)
        driver.finish(plan)
        if not driver.scheduler.queue and name != "static":
            break  # the requests that are left cannot fill the batch
    return sum(shares) / len(shares)


def test_continuous_batching_keeps_rows_busy_and_static_batching_does_not() -> None:
    mix = [500] + [10] * 7
    # 8 rows for 500 steps; 8 * 10 + 490 of these 4000 are used
    assert utilisation("static", mix, 8) == pytest.approx(570 / 4000)
    assert utilisation("vllm_v1", mix * 20, 8) > 0.95
    assert utilisation("deep_dive", mix * 20, 8) > 0.95
    assert utilisation("static", mix * 20, 8) < 0.25


# All presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_waiting_request_has_a_reason_at_every_step(name: str) -> None:
    driver = make_driver(
        name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24
    )
    for number in range(8):
        driver.add(str(number), 3 + number, 6)
    missing: list[tuple[int, int]] = []  # steps, and waiting requests without a reason
    while driver.scheduler.requests:
        plan = driver.plan()
        num_reasons = len(plan.blocked)
        num_reasons += plan.not_considered.num_requests if plan.not_considered else 0
        if num_reasons != plan.events.num_waiting:
            missing.append((plan.step, plan.events.num_waiting - num_reasons))
        driver.finish(plan)
    assert not missing


@pytest.mark.parametrize("name", PRESETS)
def test_a_blocked_request_needs_more_than_is_available(name: str) -> None:
    driver = make_driver(
        name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24
    )
    for number in range(8):
        driver.add(str(number), list(range(3 + number)), 6)
    while driver.scheduler.requests:
        for blocked in driver.step().blocked:
            assert blocked.need > blocked.have, blocked


# chunk


@pytest.mark.parametrize(
    ("rule", "first_fits", "first_too_long", "later_too_long"),
    [
        (whole, 5, 0, 0),
        (split_first, 5, 8, 0),
        (split_any, 5, 8, 8),
        (at_most(3), 3, 3, 3),
    ],
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
    driver = make_driver("vllm_v1", chunk=chunk, num_blocks=32, max_num_batched_tokens=8)
    driver.add("a", 5, 1)
    driver.add("b", 7, 1)
    driver.add("c", 3, 1)
    assert driver.steps(1)[0].chunks == first_step
    driver.run()


# queue


def test_fcfs_serves_by_arrival_and_ties_in_the_order_added() -> None:
    assert order_of_service(
        "fcfs",
        {"id": "a", "arrival": 2.0},
        {"id": "b", "arrival": 1.0},
        {"id": "c", "arrival": 1.0},
    ) == ["b", "c", "a"]


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
    driver = make_driver(
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
        "deadline(slack=60.0)", {"id": "none", "arrival": 0.0}, {"id": "soon", "deadline": 10.0},
        {"id": "late", "deadline": 90.0},
    ) == ["soon", "none", "late"]  # fmt: skip


def full_batch(**changes: Any) -> Driver:
    """A driver with two rows, both taken by requests of low priority."""
    queue = changes.pop("queue", "priority(preempts=True)")
    driver = make_driver(
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
    assert plan.events.preempted[0].is_priority
    driver.step()  # urgent has its two tokens
    assert driver.steps(1)[0].admitted == "y"


def test_no_priority_preemption_with_a_free_row() -> None:
    driver = make_driver("vllm_v1", queue="priority(preempts=True)", max_num_seqs=3, num_blocks=32)
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
    driver = make_driver("vllm_v1", queue="priority(preempts=True)", max_num_seqs=4, num_blocks=8)
    driver.add("peer", 20, 12, priority=0)
    driver.add("low", 4, 4, priority=5)
    driver.step()
    driver.add(
        "urgent", 12, 2, priority=0
    )  # 3 blocks; 2 are free, and low holds 1 and needs another
    row = driver.steps(1)[0]
    assert row.preempted == "" or row.admitted == "urgent"


# victim


def preempted_by(victim: str, *, shared: int = 0) -> str:
    """The id that the rule chooses of three running requests."""
    driver = make_driver("vllm_v1", victim=victim, num_blocks=64, max_num_seqs=3, queue="priority")
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
        ("lowest_priority", "b"),
        ("served_last", "b"),  # the queue sorts by priority
        ("fewest_lost", "b"),  # 3 private blocks, as a has, and it arrived later
    ],
)
def test_victim_rules(victim: str, chosen: str) -> None:
    assert preempted_by(victim) == chosen


def test_fewest_lost_counts_only_private_blocks() -> None:
    # a: 16 + 9 tokens in 7 blocks; b: 16 + 12 tokens in 7 blocks; 4 of them are shared. c: 4 blocks.
    assert preempted_by("fewest_lost", shared=16) == "b"


def test_served_last_follows_arrival_under_fcfs_even_after_a_resume() -> None:
    driver = make_driver("vllm_v1", victim="served_last", num_blocks=4)
    driver.add("old", 4, 9, arrival=0.0)
    driver.add("young", 4, 9, arrival=1.0)
    driver.run()
    assert driver.requests["old"].history.num_preemptions == 0
    assert driver.requests["young"].history.num_preemptions > 0


# headroom


def headroom_of(headroom: str, *, num_preemptions: int = 0, num_blocks: int = 100) -> int:
    """The headroom for a request of 5 tokens that may store 4 more, with another running."""
    driver = make_driver("vllm_v1", headroom=headroom, num_blocks=num_blocks)
    driver.add("running", 8, 9)  # stores 8 tokens now and 16 at its end
    driver.plan()
    driver.scheduler.state.outputs.pressure = float(num_preemptions)
    waiting = Request("waiting", range(5), Params(max_tokens=5))
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
    driver = make_driver("vllm", headroom="watermark(0.9)", num_blocks=8)
    driver.add("a", 29, 4)  # all 8 blocks
    assert driver.steps(1)[0].admitted == "a"


EXACT = ["reserve_outputs(1.0)", "future_peak"]


def seeds_with_preemptions(
    headroom: str, recipe: str, max_tokens: int, num_shared: int
) -> list[int]:
    """Seeds with which a headroom rule preempts although every output reaches max_tokens."""
    failed = []
    for seed in range(16):
        size = 1 + seed % 5
        most = (12 + seed) * size
        driver = make_driver(
            "vllm_v1", recipe=recipe, headroom=headroom, num_blocks=12 + seed, block_size=size,
            max_num_batched_tokens=max_tokens, max_num_seqs=6,
        )  # fmt: skip
        for number in range(20):
            length = 1 + (7 * number + seed) % (most // 2)
            own = range(1000 * (number + 1), 1000 * (number + 1) + length)
            prompt = [*range(num_shared), *own][:length]
            driver.add(str(number), prompt, 1 + (5 * number + 3 * seed) % (most // 2))
        if any(row.preempted for row in driver.run()):
            failed.append(seed)
    return failed


@pytest.mark.parametrize("recipe", ["mixed", "prefill_first", "static"])
@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts(recipe: str, headroom: str) -> None:
    assert seeds_with_preemptions(headroom, recipe, max_tokens=512, num_shared=0) == []


@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts_with_split_prompts(
    headroom: str,
) -> None:
    assert seeds_with_preemptions(headroom, "mixed", max_tokens=8, num_shared=0) == []


@pytest.mark.parametrize("headroom", EXACT)
def test_headroom_with_exact_lengths_never_preempts_with_shared_prefixes(
    headroom: str,
) -> None:
    assert seeds_with_preemptions(headroom, "mixed", max_tokens=512, num_shared=16) == []


# swap


class PrivateBlocks:
    """A view in which every request has this number of private blocks."""

    block_size = 4

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def num_private_blocks(self, request: Request) -> int:
        return self._num_blocks


def test_swap_rules() -> None:
    request = Request("a", range(40), Params())
    request.computed_base = 40
    view: Any = PrivateBlocks(10)
    assert not recompute(request, view)
    assert swap(request, view)
    # Two starts of 100 us and 2 us per token, against 24 us per token: cheaper from 10 tokens on.
    assert cheaper()(request, view)
    assert not cheaper()(request, PrivateBlocks(2))  # type: ignore[arg-type]
    assert cheaper()(request, PrivateBlocks(3))  # type: ignore[arg-type]
    assert not cheaper(copy=1e-4)(request, view)


@pytest.mark.parametrize("num_private", [1, 4, 10])
def test_cheaper_counts_attention_to_all_earlier_tokens(num_private: int) -> None:
    """Recomputed tokens attend to all tokens before them, also to those in shared blocks."""
    request = Request("a", range(40), Params())
    request.computed_base = 40
    tokens = 4 * num_private
    pairs = sum(place + 0.5 for place in range(40 - tokens, 40))
    copies = 2 * 1e-3 * tokens
    for pair, is_cheaper in ((1.01 * copies / pairs, True), (0.99 * copies / pairs, False)):
        rule = cheaper(copy=1e-3, compute=0.0, start=0.0, pair=pair)
        assert rule(request, PrivateBlocks(num_private)) == is_cheaper  # type: ignore[arg-type]


def preempting_plan(num_host_blocks: int) -> Plan:
    driver = make_driver("vllm", swap="swap", num_blocks=6, num_host_blocks=num_host_blocks)
    driver.add("a", 10, 5)
    driver.add("b", 10, 4)
    driver.steps(3)
    plan = driver.step()
    driver.run()
    driver.check_empty()
    return plan


def test_swap_falls_back_to_recompute_when_the_host_is_full() -> None:
    assert preempting_plan(3).events.preempted[0].is_swap
    assert not preempting_plan(2).events.preempted[0].is_swap
