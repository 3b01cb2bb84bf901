"""Step tables of every preset, derived by hand, and what each ready-made policy decides.

A row lists one step: admitted, decodes, chunks (id, start, end), preempted, blocked (id, reason).
Blocks hold four tokens unless a test says otherwise.
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
from tests.support.drive import Drive, Row


def drive(name: str, **changes: Any) -> Drive:
    return Drive(
        name, **{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    )


def order_of_service(queue: str, *requests: dict[str, Any]) -> list[str]:
    """Ids in the order in which one seat serves requests that are all there from the start."""
    world = drive("vllm_v1", queue=queue, max_num_seqs=1, num_blocks=64)
    for request in requests:
        world.add(**{"prompt": 4, "max_tokens": 1, **request})
    return [row.admitted for row in world.run()]


# nano_vllm


def test_nano_vllm_runs_all_prefill_or_all_decode_with_prefill_first() -> None:
    world = drive("nano_vllm", num_blocks=6, max_num_seqs=3, max_num_batched_tokens=8)
    world.add("a", 6, 3)
    world.add("b", 4, 4)
    world.add("c", 3, 3)
    assert world.run() == [
        # a takes 6 of 8 tokens; b wants 4 of the 2 left and only a first prompt may be cut
        Row("a", "", (("a", 0, 6),), "", (("b", "token_budget"),)),
        Row("b c", "", (("b", 0, 4), ("c", 0, 3))),  # prompts go before a's next token
        Row("", "a b c"),  # b crosses into its second block
        Row("", "a b c"),  # a has its 3 tokens with this one; c takes the last block
        Row("", "b"),  # c had its first with its prompt, so it is done too
    ]
    world.check_empty()


def test_nano_vllm_preempts_the_youngest_and_takes_it_back_before_later_arrivals() -> None:
    world = drive("nano_vllm", num_blocks=3)
    world.add("a", 4, 6)
    world.add("b", 4, 4)
    assert world.steps(2) == [
        Row("a b", "", (("a", 0, 4), ("b", 0, 4))),  # one block left
        Row("", "a", (), "b"),  # both cross into a new block: the youngest goes
    ]
    world.add("c", 4, 1)
    needs_two = (("b", "blocks"),)  # b's 5 tokens need 2 blocks, 1 is free; c must wait behind it
    assert world.run() == [
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),
        Row("", "a", (), "", needs_two),  # a crosses again, over b's cached block, and ends
        Row("b c", "", (("b", 0, 5), ("c", 0, 4))),  # prompt and output of b again, nothing lost
        Row("", "b"),
        Row("", "b"),
    ]
    world.check_empty()


def test_nano_vllm_cuts_the_first_prompt_of_a_batch_and_no_other() -> None:
    world = drive("nano_vllm", num_blocks=16, max_num_batched_tokens=8)
    world.add("a", 12, 2)
    world.add("b", 9, 1)
    world.add("c", 2, 1)
    assert world.run() == [
        Row("a", "", (("a", 0, 8),), "", ()),  # the budget is gone: nobody else is looked at
        Row("", "", (("a", 8, 12),), "", (("b", "token_budget"),)),  # 4 left; 9 are not cut to 4
        Row("b", "", (("b", 0, 8),)),  # now b is first
        Row("c", "", (("b", 8, 9), ("c", 0, 2))),
        Row("", "a"),
    ]


def test_nano_vllm_charges_only_the_uncached_part_of_a_prompt() -> None:
    world = drive("nano_vllm", num_blocks=16, max_num_batched_tokens=10)
    prompt = list(range(8))
    world.add("a", prompt, 1)
    world.step()
    world.add("b", [*prompt, 8], 1)
    world.add("c", 9, 1)
    assert world.steps(1) == [Row("b c", "", (("b", 8, 9), ("c", 0, 9)))]


# deep_dive


def test_deep_dive_admits_only_what_leaves_the_batch_room_to_finish() -> None:
    world = drive("deep_dive", num_blocks=6)
    for name in "abc":
        world.add(name, 4, 9)  # 12 tokens stored in the end: 3 blocks each
    # a and b: 1 block now and 2 later each, all 6. c needs 1 + 6 and finds 4.
    first = world.step()
    assert first.blocked == [Blocked(world.requests["c"], "headroom", 7, 4)]
    assert world.table[0] == Row("a b", "", (("a", 0, 4), ("b", 0, 4)), "", (("c", "headroom"),))
    rows = world.run()
    assert [row.decodes for row in rows[:8]] == ["a b"] * 8
    assert rows[8] == Row("c", "", (("c", 0, 4),))  # a and b have ended
    assert not any(row.preempted for row in rows)

    careless = drive("vllm_v1", num_blocks=6)
    for name in "abc":
        careless.add(name, 4, 9)
    assert any(row.preempted for row in careless.run())


def test_deep_dive_returns_one_batch_of_prefill_and_decode() -> None:
    world = drive("deep_dive", num_blocks=16)
    world.add("a", 3, 4)
    world.step()
    world.add("b", 5, 2)
    assert world.steps(3) == [
        Row("b", "a", (("b", 0, 5),)),
        Row("", "a b"),  # b is done
        Row("", "a"),
    ]


def test_deep_dive_frees_what_finished_for_this_same_step() -> None:
    world = drive("deep_dive", num_blocks=2)
    world.add("a", 8, 1)
    world.add("b", 8, 1)
    assert [row.admitted for row in world.run()] == ["a", "b"]


def test_deep_dive_walks_the_four_states() -> None:
    world = drive("deep_dive", num_blocks=8, max_num_batched_tokens=4)
    a = world.add("a", 6, 2)
    states = [a.state]
    for _ in range(3):
        plan = world.plan()
        states.append(a.state)
        world.finish(plan)
    states.append(a.state)
    waiting, prefill, decoding, finished = (
        State.WAITING, State.PREFILL, State.DECODING, State.FINISHED,
    )  # fmt: skip
    assert states == [waiting, prefill, decoding, decoding, finished]


# vllm and vllm_v1


@pytest.mark.parametrize("name", ["vllm", "vllm_v1"])
def test_vllm_fills_its_budget_as_in_the_worked_example(name: str) -> None:
    world = Drive(name)
    for number in range(120):
        world.add(f"d{number}", [number], 100)
    world.step()
    world.add("p", 4096, 4)
    world.add("q", 5000, 4)
    world.add("r", 10, 4)
    plan = world.step()
    assert len(plan.decodes) == 120  # leave 8072 of 8192
    assert world.table[-1].chunks == (("p", 0, 4096), ("q", 0, 3976))  # leave 3976, leave 0
    assert plan.num_tokens == 8192
    assert plan.not_considered == NotConsidered("token_budget", 1)
    plan = world.step()
    assert len(plan.decodes) == 121
    assert world.table[-1].chunks == (("q", 3976, 5000), ("r", 0, 10))


def test_vllm_swaps_the_youngest_out_and_brings_it_back_before_new_prompts() -> None:
    world = drive("vllm", num_blocks=6, num_host_blocks=6)
    world.add("a", 10, 5)
    b = world.add("b", 10, 4)
    assert world.steps(3) == [
        Row("a b", "", (("a", 0, 10), ("b", 0, 10))),  # 3 blocks each: none is left
        Row("", "a b"),
        Row("", "a b"),  # 12 tokens stored each: their blocks are full
    ]
    plan = world.step()  # both need a block; copying 12 tokens is cheaper than computing them
    assert world.table[-1] == Row("", "a", (), "b", ())
    assert plan.events.preempted[0].is_swap and len(plan.copies_out) == 3
    assert plan.not_considered == NotConsidered(
        "back_off", 1
    )  # nobody is admitted in a step that ran short
    assert b.state is State.SWAPPED
    world.add("c", 2, 1)
    assert world.steps(1) == [
        Row("", "a", (), "", (("b", "blocks"),)),  # b needs 4, 2 are free; a ends
    ]
    plan = world.step()
    assert world.table[-1] == Row("b c", "", (("b", 12, 13), ("c", 0, 2)))
    # The first two blocks are still on the device; a took the third, which comes from the host.
    assert plan.admitted[0][1:] == (8, 4, True) and len(plan.copies_in) == 1
    world.check_empty()


def swapped_b_and_urgent_c(recipe: str) -> Row:
    world = drive(
        "vllm", recipe=recipe, queue="priority", swap="swap", num_blocks=6, num_host_blocks=6
    )
    world.add("a", 10, 5)
    world.add("b", 10, 4)
    world.steps(5)  # as above: b is on the host, a has ended
    world.add("c", 20, 1, priority=-1)
    return world.steps(1)[0]


def test_a_swapped_request_comes_back_first_whatever_the_queue_says() -> None:
    assert swapped_b_and_urgent_c("swapped_first").admitted == "b"
    assert swapped_b_and_urgent_c("mixed").admitted == "c"


def test_vllm_keeps_a_share_of_blocks_free_at_admission() -> None:
    world = drive("vllm", headroom="watermark(0.5)", num_blocks=8)
    world.add("a", 4, 2)
    b = world.add("b", 16, 2)
    plan = world.step()
    assert plan.blocked == [Blocked(b, "headroom", 4 + 4, 7)]  # 4 blocks, and 4 to stay free
    other = drive("vllm", headroom="watermark(0.5)", num_blocks=8)
    other.add("a", 4, 2)
    other.add("b", 12, 2)  # 3 and 4 of 7
    assert other.step().blocked == []


def test_vllm_backs_off_after_a_preemption_and_then_relaxes() -> None:
    world = drive(
        "vllm", headroom="back_off(watermark(0.0), share=0.25)", block_size=32, num_blocks=8,
        max_num_batched_tokens=512,
    )  # fmt: skip
    world.add("a", 96, 60)
    world.add("c", 30, 3)
    b = world.add("b", 100, 8)
    assert world.steps(3) == [
        Row("a c b", "", (("a", 0, 96), ("c", 0, 30), ("b", 0, 100))),  # 3 + 1 + 4 blocks: full
        Row("", "a c", (), "b"),  # a needs a fifth
        Row("", "a c", (), "", (("b", "blocks"),)),  # 4 needed, 3 free; c ends
    ]
    # Now 4 are free. The preemption was worth 0.25 of 8 blocks and fades by 3 % a step: it asks
    # for one block more until 2 * 0.97 ** n < 1, that is for 22 steps.
    plan = world.step()
    assert plan.blocked == [Blocked(b, "back_off", 5, 4)]
    rows = world.steps(21)
    assert [row.blocked for row in rows[:20]] == [(("b", "back_off"),)] * 20
    assert rows[20] == Row("b", "a", (("b", 96, 101),))  # its three full blocks were still there


def test_vllm_v1_preempts_by_recompute_and_never_swaps() -> None:
    world = drive("vllm_v1", num_blocks=6, num_host_blocks=6)
    world.add("a", 10, 5)
    world.add("b", 10, 4)
    world.run()
    assert [row.preempted for row in world.table if row.preempted] == ["b"]
    assert world.requests["b"].history.num_preemptions == 1
    # b had stored 12 tokens; a took its tail block; two full blocks were found again.
    assert world.table[-1] == Row("b", "", (("b", 8, 13),))
    assert world.requests["b"].history.num_recomputed == 4


# minivllm


def test_minivllm_defers_decodes_over_the_token_budget_oldest_first() -> None:
    world = drive("minivllm", num_blocks=16, max_num_seqs=8, max_num_batched_tokens=6)
    for number in range(8):
        world.add(str(number), 2, 3)
    rows = world.steps(3)
    assert [row.admitted for row in rows] == ["0 1 2", "3 4 5", "6 7"]
    plan = world.step()
    assert world.table[-1].decodes == "0 1 2 3 4 5"
    assert [request.id for request in plan.deferred] == ["6", "7"]
    # The oldest stay in front, as in its deque; they have their three tokens now.
    assert [row.decodes for row in world.run()] == ["0 1 2 3 4 5", "6 7", "6 7"]


def test_minivllm_charges_the_full_prompt_and_says_what_was_missing() -> None:
    world = drive("minivllm", num_blocks=32, max_num_batched_tokens=10)
    prompt = list(range(8))
    world.add("a", prompt, 1)
    world.step()
    world.add("b", [*prompt, 8], 1)
    c = world.add("c", 2, 1)
    plan = world.step()  # b computes 1 token and pays 9
    assert world.table[-1] == Row("b", "", (("b", 8, 9),), "", (("c", "token_budget"),))
    assert plan.blocked == [Blocked(c, "token_budget", 2, 1)]
    world.run()
    world.add("d", 3, 1)
    world.add("e", [*prompt, 8], 1)
    plan = world.step()
    assert world.table[-1] == Row("d", "", (("d", 0, 3),), "", (("e", "token_budget"),))
    assert plan.blocked[0][2:] == (9, 7)  # what it would pay, not the one token it would compute


def test_minivllm_stops_at_the_model_length() -> None:
    world = drive("minivllm", num_blocks=16, max_model_len=10)
    a = world.add("a", 7, None)
    b = world.add("b", 7, 100)
    world.run()
    assert len(a.tokens) == len(b.tokens) == 10
    assert a.finish_reason == b.finish_reason == "length"


# static


def test_static_fills_a_batch_and_drains_it_completely() -> None:
    world = drive("static", num_blocks=32, max_num_seqs=2)
    world.add("a", 2, 2)
    world.add("b", 2, 4)
    world.add("c", 2, 1)
    assert world.run() == [
        Row("a b", "", (("a", 0, 2), ("b", 0, 2))),
        Row("", "a b"),  # a is done
        Row("", "b"),  # c waits though a seat is free
        Row("", "b"),
        Row("c", "", (("c", 0, 2),)),
    ]


def test_static_goes_on_filling_its_batch_over_several_prefill_steps() -> None:
    world = drive("static", num_blocks=32, max_num_seqs=4, max_num_batched_tokens=4)
    for name in "abcde":
        world.add(name, 3, 2)
    rows = world.run()
    assert rows[:4] == [
        Row("a b", "", (("a", 0, 3), ("b", 0, 1))),
        Row("c", "", (("b", 1, 3), ("c", 0, 2))),
        Row("d", "", (("c", 2, 3), ("d", 0, 3))),
        Row("", "a b c d"),
    ]
    assert [row.admitted for row in rows[4:]] == ["e", ""]


def utilisation(name: str, outputs: list[int], seats: int) -> float:
    """Mean share of seats in use; for continuous batching, while there is somebody to fill them."""
    world = Drive(name, num_blocks=4096, max_num_seqs=seats, headroom="watermark(0.0)")
    for number, output in enumerate(outputs):
        world.add(str(number), 8, output)
    shares = []
    while world.scheduler.requests:
        plan = world.plan()
        shares.append(plan.events.num_running / seats)
        world.finish(plan)
        if not world.scheduler.queue and name != "static":
            break  # from here on there is too little work to fill the seats
    return sum(shares) / len(shares)


def test_continuous_batching_keeps_the_seats_busy_and_static_does_not() -> None:
    mix = [500] + [10] * 7
    # 8 seats for 500 steps; 8 * 10 + 490 of the 4000 turns are used
    assert utilisation("static", mix, 8) == pytest.approx(570 / 4000)
    assert utilisation("vllm_v1", mix * 20, 8) > 0.95
    assert utilisation("deep_dive", mix * 20, 8) > 0.95
    assert utilisation("static", mix * 20, 8) < 0.25


# What holds for every preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_waiting_request_is_told_why_at_every_step(name: str) -> None:
    world = drive(name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24)
    for number in range(8):
        world.add(str(number), 3 + number, 6)
    untold: list[tuple[int, int]] = []
    while world.scheduler.requests:
        plan = world.plan()
        told = len(plan.blocked) + (plan.not_considered.num_requests if plan.not_considered else 0)
        if told != plan.events.num_waiting:
            untold.append((plan.step, plan.events.num_waiting - told))
        world.finish(plan)
    assert not untold, "steps, and how many of their waiting requests have no reason"


@pytest.mark.parametrize("name", PRESETS)
def test_a_reason_names_more_need_than_there_was(name: str) -> None:
    world = drive(name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24)
    for number in range(8):
        world.add(str(number), list(range(3 + number)), 6)
    while world.scheduler.requests:
        for blocked in world.step().blocked:
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
    world = drive("vllm_v1", chunk=chunk, num_blocks=32, max_num_batched_tokens=8)
    world.add("a", 5, 1)
    world.add("b", 7, 1)
    world.add("c", 3, 1)
    assert world.steps(1)[0].chunks == first_step
    world.run()


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


def test_priority_with_aging_lets_a_long_wait_outweigh_a_level() -> None:
    late = {"id": "late", "priority": 0, "arrival": 21.0}
    early = {"id": "early", "priority": 2, "arrival": 0.0}
    assert order_of_service("priority(aging=10.0)", late, early) == ["early", "late"]
    assert order_of_service("priority(aging=11.0)", late, early) == ["late", "early"]
    assert order_of_service("priority", late, early) == ["late", "early"]


def test_shortest_first_counts_what_is_left_after_cache_hits() -> None:
    world = drive("vllm_v1", queue="shortest_first(aging=1.0)", max_num_seqs=1, num_blocks=64)
    prompt = list(range(40))
    world.add("warm", prompt, 1)
    world.run()
    world.add("short", 8, 1)
    world.add("long but cached", [*prompt, 40], 1)  # 1 token left to compute
    world.add("shorter", 4, 1)
    assert [row.admitted for row in world.run()] == ["long but cached", "shorter", "short"]


def test_shortest_first_does_not_starve_a_long_prompt() -> None:
    assert order_of_service(
        "shortest_first(aging=0.5)", {"id": "long", "prompt": 24}, {"id": "a", "arrival": 9.0},
        {"id": "b", "arrival": 11.0},
    ) == ["a", "long", "b"]  # fmt: skip  # 12, 9 + 2, 11 + 2


def test_fair_serves_the_client_that_had_least() -> None:
    heavy = [{"id": f"h{n}", "client": "heavy", "prompt": 12} for n in range(3)]
    light = [{"id": f"l{n}", "client": "light", "prompt": 4, "arrival": 1.0} for n in range(3)]
    # A turn costs prompt + 2 for its output token: heavy 14, then light 6, 12, 18, heavy 28.
    assert order_of_service("fair", *heavy, *light) == ["h0", "l0", "l1", "l2", "h1", "h2"]


def test_deadline_serves_the_earliest_and_gives_others_some_slack() -> None:
    assert order_of_service(
        "deadline(slack=60.0)", {"id": "none", "arrival": 0.0}, {"id": "soon", "deadline": 10.0},
        {"id": "late", "deadline": 90.0},
    ) == ["soon", "none", "late"]  # fmt: skip


def bump_world(**changes: Any) -> Drive:
    """Two seats, both taken by requests of low priority."""
    queue = changes.pop("queue", "priority(preempts=True)")
    world = drive("vllm_v1", queue=queue, victim="served_last", max_num_seqs=2, num_blocks=32)
    world.add("x", 4, 40, priority=5)
    world.add("y", 4, 40, priority=6)
    world.step()
    return world


def test_a_waiting_high_priority_preempts_the_lowest_running() -> None:
    world = bump_world()
    world.add("urgent", 4, 2, priority=0)
    plan = world.step()
    assert world.table[-1] == Row("urgent", "x", (("urgent", 0, 4),), "y", ())
    assert plan.events.preempted[0].is_priority
    world.step()  # urgent has its two tokens
    assert world.steps(1)[0].admitted == "y"


def test_no_preemption_for_priority_where_there_is_room() -> None:
    world = drive("vllm_v1", queue="priority(preempts=True)", max_num_seqs=3, num_blocks=32)
    world.add("x", 4, 40, priority=5)
    world.add("y", 4, 40, priority=6)
    world.step()
    world.add("urgent", 4, 2, priority=0)
    assert world.steps(1)[0] == Row("urgent", "x y", (("urgent", 0, 4),))


def test_equal_priorities_never_preempt_each_other() -> None:
    world = bump_world()
    world.add("peer", 4, 2, priority=6)
    assert world.steps(1)[0] == Row("", "x y")


def test_without_preempts_a_high_priority_waits_for_a_seat() -> None:
    world = bump_world(queue="priority")
    world.add("urgent", 4, 2, priority=0)
    assert world.steps(1)[0] == Row("", "x y")


def test_nobody_is_bumped_more_than_max_bumps_times() -> None:
    world = bump_world(queue="priority(preempts=True, max_preemptions=2)")
    for number in range(6):
        world.add(f"urgent{number}", 4, 2, priority=0)
        world.steps(3)
    world.run()
    assert world.requests["y"].history.num_priority_preemptions == 2
    assert world.requests["x"].history.num_priority_preemptions <= 2
    assert all(request.finish_reason == "length" for request in world.requests.values())


def test_a_bump_that_would_not_be_enough_does_not_happen() -> None:
    world = drive("vllm_v1", queue="priority(preempts=True)", max_num_seqs=4, num_blocks=8)
    world.add("peer", 20, 12, priority=0)
    world.add("low", 4, 4, priority=5)
    world.step()
    world.add("urgent", 12, 2, priority=0)  # 3 blocks; 2 are free and low holds 1, about to be 2
    row = world.steps(1)[0]
    assert row.preempted == "" or row.admitted == "urgent"


# victim


def preempted_by(victim: str, *, shared: int = 0) -> str:
    """Who goes first, of three running requests of which two must go on."""
    world = drive("vllm_v1", victim=victim, num_blocks=64, max_num_seqs=3, queue="priority")
    common = list(range(shared))
    world.add("a", [*common, *range(100, 108)], 20, priority=2)
    world.step()
    world.add("b", [*common, *range(200, 212)], 20, priority=3)
    world.add("c", range(300, 316), 20, priority=1)
    world.step()
    scheduler = world.scheduler
    return max(scheduler.running, key=lambda r: scheduler.config.victim(r, scheduler.state.view)).id


@pytest.mark.parametrize(
    ("victim", "chosen"),
    [
        ("newest", "b"),  # c was admitted just before it: priority 1 goes before 3
        ("least_work", "a"),  # 9 tokens computed, against 12 and 16
        ("lowest_priority", "b"),
        ("served_last", "b"),  # the queue is by priority
        ("fewest_lost", "b"),  # 3 blocks of its own, as a, and it came later
    ],
)
def test_victim_rules(victim: str, chosen: str) -> None:
    assert preempted_by(victim) == chosen


def test_fewest_lost_counts_only_what_nobody_else_keeps() -> None:
    # a: 16 + 9 tokens in 7 blocks; b: 16 + 12 in 7; 4 of each shared. c: 4 of its own.
    assert preempted_by("fewest_lost", shared=16) == "b"


def test_served_last_follows_arrival_under_fcfs_even_after_a_resume() -> None:
    world = drive("vllm_v1", victim="served_last", num_blocks=4)
    world.add("old", 4, 9, arrival=0.0)
    world.add("young", 4, 9, arrival=1.0)
    world.run()
    assert world.requests["old"].history.num_preemptions == 0
    assert world.requests["young"].history.num_preemptions > 0


# headroom


def headroom_asked(headroom: str, *, num_preemptions: int = 0, num_blocks: int = 100) -> int:
    """What the rule asks for a newcomer of 5 tokens that may store 4 more, beside one running."""
    world = drive("vllm_v1", headroom=headroom, num_blocks=num_blocks)
    world.add("running", 8, 9)  # 16 stored in the end; 8 now
    world.plan()
    world.scheduler.state.outputs.pressure = float(num_preemptions)
    newcomer = Request("newcomer", range(5), Params(max_tokens=5))
    newcomer.limit = 10
    return world.scheduler.config.headroom(newcomer, world.scheduler.state.view)


@pytest.mark.parametrize(
    ("headroom", "asked"),
    [
        ("watermark(0.0)", 0),
        ("watermark(0.05)", 5),
        ("reserve_outputs(1.0)", 2 + 1),  # 8 more tokens, and 4 more
        ("reserve_outputs(0.5)", 2),  # half of three, rounded up
        ("back_off(watermark(0.05), share=0.02)", 5),
    ],
)
def test_headroom_rules(headroom: str, asked: int) -> None:
    assert headroom_asked(headroom) == asked


def test_future_peak_asks_for_the_fullest_moment_to_come() -> None:
    # 4 steps on: 12 and 9 tokens, 6 blocks; the 4 of now are there.
    assert headroom_asked("future_peak", num_blocks=7) == 2
    assert headroom_asked("future_peak(margin=0.3)", num_blocks=7) == 2 + 2
    assert 2 <= headroom_asked("future_peak") <= 100 - 4  # where all could ever fit, an upper bound


def test_back_off_asks_its_share_for_every_recent_preemption() -> None:
    assert headroom_asked("back_off(watermark(0.05), share=0.02)", num_preemptions=3) == 5 + 6


def test_a_lone_request_may_always_run_whatever_the_headroom() -> None:
    world = drive("vllm", headroom="watermark(0.9)", num_blocks=8)
    world.add("a", 29, 4)  # all 8 blocks
    assert world.steps(1)[0].admitted == "a"


KNOWING = ["reserve_outputs(1.0)", "future_peak"]


def preemptions(headroom: str, recipe: str, max_tokens: int, num_shared: int) -> list[int]:
    """Seeds of small worlds in which a rule that is told every output still preempts."""
    failed = []
    for seed in range(16):
        size = 1 + seed % 5
        most = (12 + seed) * size
        world = drive(
            "vllm_v1", recipe=recipe, headroom=headroom, num_blocks=12 + seed, block_size=size,
            max_num_batched_tokens=max_tokens, max_num_seqs=6,
        )  # fmt: skip
        for number in range(20):
            length = 1 + (7 * number + seed) % (most // 2)
            own = range(1000 * (number + 1), 1000 * (number + 1) + length)
            prompt = [*range(num_shared), *own][:length]
            world.add(str(number), prompt, 1 + (5 * number + 3 * seed) % (most // 2))
        if any(row.preempted for row in world.run()):
            failed.append(seed)
    return failed


@pytest.mark.parametrize("recipe", ["mixed", "prefill_first", "static"])
@pytest.mark.parametrize("headroom", KNOWING)
def test_a_headroom_that_knows_the_outputs_never_preempts(recipe: str, headroom: str) -> None:
    assert preemptions(headroom, recipe, max_tokens=512, num_shared=0) == []


@pytest.mark.parametrize("headroom", KNOWING)
def test_a_headroom_that_knows_the_outputs_never_preempts_when_prompts_are_cut(
    headroom: str,
) -> None:
    assert preemptions(headroom, "mixed", max_tokens=8, num_shared=0) == []


@pytest.mark.parametrize("headroom", KNOWING)
def test_a_headroom_that_knows_the_outputs_never_preempts_when_prefixes_are_shared(
    headroom: str,
) -> None:
    assert preemptions(headroom, "mixed", max_tokens=512, num_shared=16) == []


# swap


class PrivateBlocks:
    """A world in which every request has this many blocks to itself."""

    block_size = 4

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def num_private_blocks(self, request: Request) -> int:
        return self._num_blocks


def test_swap_rules() -> None:
    request = Request("a", range(40), Params())
    request.computed_base = 40
    world: Any = PrivateBlocks(10)
    assert not recompute(request, world)
    assert swap(request, world)
    # two starts of 100 us and 2 us a token, against 24 us a token: from 10 tokens on
    assert cheaper()(request, world)
    assert not cheaper()(request, PrivateBlocks(2))  # type: ignore[arg-type]
    assert cheaper()(request, PrivateBlocks(3))  # type: ignore[arg-type]
    assert not cheaper(copy=1e-4)(request, world)


@pytest.mark.parametrize("num_private", [1, 4, 10])
def test_computing_again_takes_longer_the_more_comes_before(num_private: int) -> None:
    """Each of the last tokens attends to all before it, those that others keep as well."""
    request = Request("a", range(40), Params())
    request.computed_base = 40
    tokens = 4 * num_private
    pairs = sum(place + 0.5 for place in range(40 - tokens, 40))
    copies = 2 * 1e-3 * tokens
    for pair, is_dear in ((1.01 * copies / pairs, True), (0.99 * copies / pairs, False)):
        rule = cheaper(copy=1e-3, compute=0.0, start=0.0, pair=pair)
        assert rule(request, PrivateBlocks(num_private)) == is_dear  # type: ignore[arg-type]


def swap_world(num_host_blocks: int) -> Plan:
    world = drive("vllm", swap="swap", num_blocks=6, num_host_blocks=num_host_blocks)
    world.add("a", 10, 5)
    world.add("b", 10, 4)
    world.steps(3)
    plan = world.step()
    world.run()
    world.check_empty()
    return plan


def test_swap_falls_back_to_recompute_when_the_host_is_full() -> None:
    assert swap_world(3).events.preempted[0].is_swap
    assert not swap_world(2).events.preempted[0].is_swap
