"""Step tables of every preset, derived by hand.

A row lists one step: admitted, decodes, chunks (id, start, end), preempted, blocked (id, reason).
Blocks hold four tokens unless a test changes it.
"""

from __future__ import annotations

import pytest

from headway import PRESETS, RequestState
from headway.plan import Blocked, NotConsidered
from tests.support.drive import Driver, Row, small_driver


def test_nano_vllm_runs_all_prefill_or_all_decode_with_prefill_first() -> None:
    driver = small_driver("nano_vllm", num_blocks=6, max_num_seqs=3, max_num_batched_tokens=8)
    driver.add_all(a=(6, 3), b=(4, 4), c=(3, 3))
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
    driver = small_driver("nano_vllm", num_blocks=3)
    driver.add_all(a=(4, 6), b=(4, 4))
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
    driver = small_driver("nano_vllm", num_blocks=16, max_num_batched_tokens=8)
    driver.add_all(a=(12, 2), b=(9, 1), c=(2, 1))
    assert driver.run() == [
        # the budget is used up: no other request is considered
        Row("a", "", (("a", 0, 8),), "", ()),
        # 4 tokens are left; the 9 of b are not split
        Row("", "", (("a", 8, 12),), "", (("b", "token_budget"),)),
        Row("b", "", (("b", 0, 8),)),  # b is the first prompt now
        Row("c", "", (("b", 8, 9), ("c", 0, 2))),
        Row("", "a"),
    ]


def test_nano_vllm_charges_only_the_uncached_part_of_a_prompt() -> None:
    driver = small_driver("nano_vllm", num_blocks=16, max_num_batched_tokens=10)
    prompt = list(range(8))
    driver.add("a", prompt, 1)
    driver.step()
    driver.add_all(b=([*prompt, 8], 1), c=(9, 1))
    assert driver.steps(1) == [Row("b c", "", (("b", 8, 9), ("c", 0, 9)))]


def test_deep_dive_admits_a_request_only_if_the_batch_can_finish() -> None:
    driver = small_driver("deep_dive", num_blocks=6)
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

    other = small_driver("vllm_v1", num_blocks=6)
    for name in "abc":
        other.add(name, 4, 9)
    assert any(row.preempted for row in other.run())


def test_deep_dive_mixes_prefill_and_decode() -> None:
    driver = small_driver("deep_dive", num_blocks=16)
    driver.add("a", 3, 4)
    driver.step()
    driver.add("b", 5, 2)
    assert driver.steps(3) == [
        Row("b", "a", (("b", 0, 5),)),
        Row("", "a b"),  # b is finished
        Row("", "a"),
    ]


def test_deep_dive_reuses_the_blocks_of_a_finished_request_in_the_next_step() -> None:
    driver = small_driver("deep_dive", num_blocks=2)
    driver.add_all(a=(8, 1), b=(8, 1))
    assert [row.admitted for row in driver.run()] == ["a", "b"]


def test_deep_dive_uses_the_four_states() -> None:
    driver = small_driver("deep_dive", num_blocks=8, max_num_batched_tokens=4)
    a = driver.add("a", 6, 2)
    states = [a.state]
    for _ in range(3):
        plan = driver.plan()
        states.append(a.state)
        driver.finish(plan)
    states.append(a.state)
    waiting, prefill, decoding, finished = (
        RequestState.WAITING, RequestState.PREFILL, RequestState.DECODING, RequestState.FINISHED,
    )  # fmt: skip
    assert states == [waiting, prefill, decoding, decoding, finished]


@pytest.mark.parametrize("name", ["vllm", "vllm_v1"])
def test_vllm_fills_its_token_budget(name: str) -> None:
    driver = Driver(name)
    for number in range(120):
        driver.add(f"d{number}", [number], 100)
    driver.step()
    driver.add_all(p=(4096, 4), q=(5000, 4), r=(10, 4))
    plan = driver.step()
    assert len(plan.decodes) == 120  # 8072 of 8192 tokens are left
    assert driver.table[-1].chunks == (("p", 0, 4096), ("q", 0, 3976))  # 3976 are left, then 0
    assert plan.num_tokens == 8192
    assert plan.not_considered == NotConsidered("token_budget", 1)
    plan = driver.step()
    assert len(plan.decodes) == 121
    assert driver.table[-1].chunks == (("q", 3976, 5000), ("r", 0, 10))


def test_vllm_swaps_the_newest_out_and_resumes_it_before_new_prompts() -> None:
    driver = small_driver("vllm", num_blocks=6, num_host_blocks=6)
    _, b = driver.add_all(a=(10, 5), b=(10, 4))
    assert driver.steps(3) == [
        Row("a b", "", (("a", 0, 10), ("b", 0, 10))),  # 3 blocks each: none is free
        Row("", "a b"),
        Row("", "a b"),  # 12 tokens are stored each: the blocks are full
    ]
    plan = driver.step()  # both need a block; copying 12 tokens is cheaper than recomputing them
    assert driver.table[-1] == Row("", "a", (), "b", ())
    assert plan.preempted[0].is_swap and len(plan.copies_out) == 3
    # a step that preempts for blocks admits no request
    assert plan.not_considered == NotConsidered("after_preemption", 1)
    assert b.state is RequestState.SWAPPED
    driver.add("c", 2, 1)
    assert driver.steps(1) == [
        Row("", "a", (), "", (("b", "blocks"),)),  # b needs 4, 2 are free; a ends
    ]
    plan = driver.step()
    assert driver.table[-1] == Row("b c", "", (("b", 12, 13), ("c", 0, 2)))
    # The first two blocks are still on the device. The third was reused: it comes from the host.
    assert plan.admitted[0][1:4] == (8, 4, True) and len(plan.copies_in) == 1
    driver.check_empty()


def swapped_b_and_urgent_c(batching: str) -> Row:
    driver = small_driver(
        "vllm", batching=batching, queue="priority", swap="swap", num_blocks=6, num_host_blocks=6
    )
    driver.add_all(a=(10, 5), b=(10, 4))
    driver.steps(5)  # as above: b is on the host, a is finished
    driver.add("c", 20, 1, priority=-1)
    return driver.steps(1)[0]


def test_swapped_first_resumes_a_swapped_request_before_a_higher_priority() -> None:
    assert swapped_b_and_urgent_c("swapped_first").admitted == "b"
    assert swapped_b_and_urgent_c("mixed").admitted == "c"


def test_vllm_keeps_a_share_of_blocks_free_at_admission() -> None:
    driver = small_driver("vllm", headroom="watermark(0.5)", num_blocks=8)
    _, b = driver.add_all(a=(4, 2), b=(16, 2))
    plan = driver.step()
    assert plan.blocked == [Blocked(b, "headroom", 4 + 4, 7)]  # 4 blocks, and 4 that stay free
    other = small_driver("vllm", headroom="watermark(0.5)", num_blocks=8)
    other.add("a", 4, 2)
    other.add("b", 12, 2)  # 3 and 4 of 7
    assert other.step().blocked == []


def test_vllm_backs_off_for_22_steps_after_a_preemption() -> None:
    driver = small_driver(
        "vllm", headroom="back_off(watermark(0.0), share=0.25)", block_size=32, num_blocks=8,
        max_num_batched_tokens=512,
    )  # fmt: skip
    _, _, b = driver.add_all(a=(96, 60), c=(30, 3), b=(100, 8))
    assert driver.steps(3) == [
        # 3 + 1 + 4 blocks: none is free
        Row("a c b", "", (("a", 0, 96), ("c", 0, 30), ("b", 0, 100))),
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
    driver = small_driver("vllm_v1", num_blocks=6, num_host_blocks=6)
    driver.add_all(a=(10, 5), b=(10, 4))
    driver.run()
    assert [row.preempted for row in driver.table if row.preempted] == ["b"]
    assert driver.requests["b"].history.num_preemptions == 1
    # b had stored 12 tokens; its last block was reused; its first two blocks are hits.
    assert driver.table[-1] == Row("b", "", (("b", 8, 13),))
    assert driver.requests["b"].history.num_recomputed == 4


def test_minivllm_defers_decodes_over_the_token_budget_oldest_first() -> None:
    driver = small_driver("minivllm", num_blocks=16, max_num_seqs=8, max_num_batched_tokens=6)
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
    driver = small_driver("minivllm", num_blocks=32, max_num_batched_tokens=10)
    prompt = list(range(8))
    driver.add("a", prompt, 1)
    driver.step()
    _, c = driver.add_all(b=([*prompt, 8], 1), c=(2, 1))
    plan = driver.step()  # b computes 1 token and is charged for 9
    assert driver.table[-1] == Row("b", "", (("b", 8, 9),), "", (("c", "token_budget"),))
    assert plan.blocked == [Blocked(c, "token_budget", 2, 1)]
    driver.run()
    driver.add_all(d=(3, 1), e=([*prompt, 8], 1))
    plan = driver.step()
    assert driver.table[-1] == Row("d", "", (("d", 0, 3),), "", (("e", "token_budget"),))
    assert plan.blocked[0][2:] == (9, 7)  # the 9 tokens charged, not the 1 token computed


def test_minivllm_stops_at_max_model_len() -> None:
    driver = small_driver("minivllm", num_blocks=16, max_model_len=10)
    a, b = driver.add_all(a=(7, None), b=(7, 100))
    driver.run()
    assert len(a.tokens) == len(b.tokens) == 10
    assert a.finish_reason == b.finish_reason == "length"


def test_static_finishes_a_batch_before_the_next() -> None:
    driver = small_driver("static", num_blocks=32, max_num_seqs=2)
    driver.add_all(a=(2, 2), b=(2, 4), c=(2, 1))
    assert driver.run() == [
        Row("a b", "", (("a", 0, 2), ("b", 0, 2))),
        Row("", "a b"),  # a is finished
        Row("", "b"),  # c waits although a row is free
        Row("", "b"),
        Row("c", "", (("c", 0, 2),)),
    ]


def test_static_fills_a_batch_over_several_prefill_steps() -> None:
    driver = small_driver("static", num_blocks=32, max_num_seqs=4, max_num_batched_tokens=4)
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
        shares.append(driver.scheduler.last_planned.num_running / max_num_seqs)
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


@pytest.mark.parametrize("name", PRESETS)
def test_every_waiting_request_has_a_reason_at_every_step(name: str) -> None:
    driver = small_driver(
        name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24
    )
    for number in range(8):
        driver.add(str(number), 3 + number, 6)
    missing: list[tuple[int, int]] = []  # steps, and waiting requests without a reason
    while driver.scheduler.requests:
        plan = driver.plan()
        num_reasons = len(plan.blocked)
        num_reasons += plan.not_considered.num_requests if plan.not_considered else 0
        num_waiting = driver.scheduler.last_planned.num_waiting
        if num_reasons != num_waiting:
            missing.append((plan.step, num_waiting - num_reasons))
        driver.finish(plan)
    assert not missing


@pytest.mark.parametrize("name", PRESETS)
def test_a_blocked_request_needs_more_than_is_available(name: str) -> None:
    driver = small_driver(
        name, num_blocks=6, num_host_blocks=4, max_num_seqs=3, max_num_batched_tokens=24
    )
    for number in range(8):
        driver.add(str(number), list(range(3 + number)), 6)
    while driver.scheduler.requests:
        for blocked in driver.step().blocked:
            assert blocked.need > blocked.have, blocked
