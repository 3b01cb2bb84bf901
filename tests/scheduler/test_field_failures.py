"""Failures known from other engines, each by its name: none of them may happen here."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from headway.errors import InvalidRequest, RequestError, RequestTooLong
from headway.plan import Blocked, Plan
from headway.request import State
from headway.scheduler.policies import MAX_PREFILL_STEPS
from headway.scheduler.presets import PRESETS
from tests.support.drive import Drive, Row, count_up, names


def drive(name: str = "vllm_v1", **changes: Any) -> Drive:
    return Drive(
        name, **{"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    )


def check_outputs(world: Drive) -> None:
    """Each token once, in order, at its position; all of them, if it ran to its length."""
    for request in world.requests.values():
        output = request.tokens[request.num_prompt :].tolist()
        places = range(request.num_prompt, len(request.tokens))
        assert output == [count_up(request, place) for place in places], request
        if request.finish_reason == "length":
            assert len(request.tokens) == request.limit


def run_overlapped(world: Drive, most: int = 10_000) -> None:
    """To the end with one plan in flight while the next is made."""
    flying: deque[Plan] = deque()
    for _ in range(most):
        if not world.scheduler.requests and not flying:
            return
        plan = world.plan()
        if not plan.is_empty:
            flying.append(plan)
        assert flying, "work at hand, nothing in flight, and an empty plan"
        if plan.is_empty or len(flying) == 2:
            world.finish(flying.popleft())
    raise AssertionError("still unfinished: a hang")


# Liveness: a blocked head, and requests that can never run


def blocked_head(queue: str) -> Drive:
    """A head that needs 100 blocks while 20 are free, and small ones behind it that need 5."""
    world = drive(queue=queue, num_blocks=121, max_num_seqs=64, max_num_batched_tokens=1024)
    world.add("runner", 400, 41)  # 100 blocks, 101 with its next token
    world.step()
    world.add("head", 400, 4)
    for number in range(40):
        world.add(f"small{number}", 20, 1)
    return world


def test_small_requests_run_past_a_head_that_needs_100_blocks_with_20_free() -> None:
    world = blocked_head("fcfs(8)")
    plan = world.step()
    assert plan.blocked[0] == Blocked(world.requests["head"], "blocks", 100, 20)
    assert world.table[-1].admitted == "small0 small1 small2 small3"


def test_a_skipped_head_is_overtaken_only_so_often_and_then_served() -> None:
    world = blocked_head("fcfs(8)")
    rows = world.run()
    admitted = " ".join(row.admitted for row in rows).split()
    assert admitted.index("head") == 8
    assert world.requests["head"].history.num_overtaken == 8
    assert admitted[:8] == [f"small{n}" for n in range(8)]
    world.check_empty()


def test_without_patience_a_blocked_head_hides_the_rest_and_nothing_hangs() -> None:
    world = blocked_head("fcfs")
    admitted = " ".join(row.admitted for row in world.run()).split()
    assert admitted == ["head", *(f"small{n}" for n in range(40))]
    world.check_empty()


@pytest.mark.parametrize("name", PRESETS)
def test_a_request_larger_than_the_cache_is_refused_and_the_others_go_on(name: str) -> None:
    world = drive(name, num_blocks=8)
    world.add("a", 8, 4)
    with pytest.raises(RequestTooLong, match="33 KV blocks.* 8$") as refusal:
        world.add("giant", 129, 2)
    assert (refusal.value.need, refusal.value.limit) == (33, 8)
    assert isinstance(refusal.value, RequestError)
    assert list(world.scheduler.requests) == ["a"]
    world.run()
    check_outputs(world)
    world.check_empty()


def test_a_lone_request_that_would_outgrow_the_cache_is_refused_at_the_door() -> None:
    world = drive(num_blocks=8)
    world.add("just fits", 1, 32)  # 32 tokens stored; the last one sampled is not
    with pytest.raises(RequestTooLong):
        world.add("outgrows", 1, 33)
    world.run()
    check_outputs(world)


def test_a_resumed_request_that_could_outgrow_the_token_budget_is_refused_at_the_door() -> None:
    world = drive(chunk="whole", num_blocks=64, max_num_batched_tokens=16)
    world.add("fits", 10, 7)  # 16 known tokens at most when it is computed again
    with pytest.raises(RequestTooLong, match="max_num_batched_tokens is 16") as refusal:
        world.add("outgrows", 10, 8)
    assert (refusal.value.need, refusal.value.limit) == (17, 16)


def test_a_prompt_over_the_budget_is_cut_or_refused_but_never_waits_for_ever() -> None:
    world = drive(chunk="split_any", num_blocks=64, max_num_batched_tokens=16)
    world.add("long", 50, 2)
    assert [row.chunks[0][1:] for row in world.steps(4)] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    with pytest.raises(RequestTooLong):
        drive("minivllm", num_blocks=64, max_num_batched_tokens=16).add("long", 50, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 4, "empty prompt"),
        (4, 0, "max_tokens must be a whole number of at least 1"),
        (4, -1, "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_clear_error(
    prompt: int, max_tokens: int, message: str
) -> None:
    world = drive(num_blocks=8)
    with pytest.raises(InvalidRequest, match=message):
        world.add("a", prompt, max_tokens)
    assert not world.scheduler.requests


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    world = drive(num_blocks=8)
    world.add("a", 4, 1)
    with pytest.raises(InvalidRequest, match="in use"):
        world.add("a", 4, 1)
    world.run()
    world.add("a", 4, 1)
    world.run()
    world.check_empty()


def test_the_model_length_is_enforced() -> None:
    world = drive(num_blocks=64, max_model_len=16)
    with pytest.raises(RequestTooLong) as refusal:
        world.add("no room for one more", 16, 1)
    assert (refusal.value.need, refusal.value.limit) == (17, 16)
    a = world.add("a", 15, 50)
    world.run()
    assert a.num_generated == 1 and a.finish_reason == "length"


@pytest.mark.parametrize("name", PRESETS)
def test_seats_bound_the_running_set_and_not_only_a_batch(name: str) -> None:
    world = drive(name, num_blocks=512, max_num_seqs=8)
    for number in range(64):
        world.add(str(number), 5, 20)
    while world.scheduler.requests:
        plan = world.step()
        assert plan.events.num_running <= 8 and len(world.scheduler.running) <= 8
    check_outputs(world)


def test_admission_counts_blocks_and_not_tokens() -> None:
    world = drive(block_size=16, num_blocks=2, max_num_seqs=8)
    for number in range(4):
        world.add(str(number), 1, 2)
    assert world.steps(1)[0] == Row(
        "0 1", "", (("0", 0, 1), ("1", 0, 1)), "", (("2", "blocks"),)
    )  # four tokens would fit in one block


# Thrash


def test_a_long_prompt_is_not_admitted_chunk_by_chunk_without_room_for_the_whole() -> None:
    world = drive(num_blocks=12, max_num_batched_tokens=8)
    world.add("a", 8, 24)  # 2 blocks, 8 in the end
    world.step()
    long = world.add("long", 44, 2)  # 11 blocks; its first chunk would need only 2
    plan = world.step()
    assert plan.blocked == [Blocked(long, "blocks", 11, 9)]
    world.run()
    assert long.history.num_preemptions == 0 and long.history.num_recomputed == 0


@pytest.mark.parametrize("victim", ["newest", "served_last", "least_work", "fewest_lost"])
def test_every_admission_makes_progress_however_often_one_is_preempted(victim: str) -> None:
    world = drive(victim=victim, num_blocks=7, max_num_seqs=6)
    for number in range(6):
        world.add(str(number), 4, 24)
    world.run()
    check_outputs(world)
    for request in world.requests.values():
        assert request.history.num_preemptions < request.num_generated
    world.check_empty()


def test_the_oldest_is_never_preempted_where_the_victim_is_served_last() -> None:
    world = drive(victim="served_last", num_blocks=8, max_num_seqs=6)
    for number in range(6):
        world.add(str(number), 4, 24, arrival=float(number))
    order: list[str] = []
    while world.scheduler.requests:
        world.step()
        order += [r.id for r in world.requests.values() if r.is_finished and r.id not in order]
    assert world.requests["0"].history.num_preemptions == 0
    assert order == sorted(order)  # each in its turn: none loses its place


def test_a_preempted_request_returns_to_its_own_place() -> None:
    world = drive(num_blocks=4, max_num_seqs=3)
    world.add("a", 4, 10, arrival=0.0)
    world.add("b", 4, 9, arrival=1.0)
    world.step()
    for number in range(3):
        world.add(f"later{number}", 4, 1, arrival=2.0 + number)
    rows = world.run()
    assert any(row.preempted == "b" for row in rows)
    after = rows[next(i for i, row in enumerate(rows) if row.preempted == "b") :]
    admitted = " ".join(row.admitted for row in after).split()
    assert admitted[0] == "b"
    assert [name for name in admitted if name != "b"] == sorted(set(admitted) - {"b"})


def test_preempt_then_prefix_hit_then_preempt() -> None:
    world = drive(num_blocks=8, max_num_seqs=3)
    world.add("a", 4, 20)
    world.add("b", 4, 6)
    c = world.add("c", 9, 16)
    world.run()
    assert c.history.num_preemptions == 2
    # It came back twice with what it had generated, each time from its two cached full blocks.
    chunks = [chunk for row in world.table for chunk in row.chunks if chunk[0] == "c"]
    assert chunks == [("c", 0, 9), ("c", 8, 14), ("c", 8, 17)]
    check_outputs(world)
    world.check_empty()


def test_nobody_is_admitted_in_the_step_that_ran_short() -> None:
    world = drive(num_blocks=3)
    world.add("a", 4, 4)
    world.add("b", 4, 4)
    world.step()
    world.add("c", 1, 1)
    row = world.steps(1)[0]
    assert row.preempted == "b" and row.admitted == ""


def test_recomputed_tokens_are_counted() -> None:
    world = drive(num_blocks=3, max_num_seqs=2)
    world.add("a", 4, 6)
    b = world.add("b", 4, 4)
    world.run()
    assert b.history.num_recomputed == 4  # its only block was taken; it had stored 4 tokens


# Starved decodes, starved prompts


def test_mixed_batches_never_skip_a_decode_for_prompts() -> None:
    world = drive(num_blocks=512, max_num_seqs=64, max_num_batched_tokens=64)
    world.add("a", 4, 100)
    world.step()
    for step in range(98):
        world.add(str(step), 60, 1)
        assert "a" in world.steps(1)[0].decodes.split()


@pytest.mark.parametrize("name", ["nano_vllm", "minivllm"])
def test_a_stream_of_prompts_holds_decodes_up_for_16_steps_at_most(name: str) -> None:
    world = drive(name, num_blocks=512, max_num_seqs=8)
    world.add("a", 4, 20)
    world.step()
    turns: list[bool] = []
    for step in range(98):
        world.add(str(step), 60, 1)
        turns.append("a" in world.steps(1)[0].decodes.split())
    waits = "".join("x" if turn else "." for turn in turns).split("x")
    assert max(len(wait) for wait in waits) == MAX_PREFILL_STEPS == 16
    assert sum(turns) == 98 // 17


def test_a_short_prompt_does_not_jump_a_long_one_when_chunking_is_off() -> None:
    world = drive(chunk="whole", num_blocks=64, max_num_batched_tokens=16, queue="fcfs(8)")
    world.add("first", 10, 1)
    world.add("long", 12, 1)
    world.add("short", 2, 1)
    assert world.steps(2) == [
        Row("first", "", (("first", 0, 10),), "", (("long", "token_budget"),)),
        Row("long short", "", (("long", 0, 12), ("short", 0, 2))),
    ]


def test_short_residual_prefills_go_first_not_short_prompts() -> None:
    world = drive(queue="shortest_first(aging=1.0)", num_blocks=64, max_num_seqs=1)
    shared = list(range(48))
    world.add("warm", shared, 1)
    world.run()
    world.add("short prompt", 8, 1)
    world.add("short residual", [*shared, 1, 2], 1)
    assert world.steps(1)[0].admitted == "short residual"


@pytest.mark.parametrize("name", PRESETS)
def test_no_step_computes_more_than_its_token_budget(name: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        world = drive(
            name, swap="swap", num_blocks=10, num_host_blocks=20, max_num_batched_tokens=6, max_num_seqs=5,
            chunk="split_any",
        )  # fmt: skip
        for number in range(12):
            world.add(str(number), rng.randrange(1, 20), rng.randrange(1, 20))
        while world.scheduler.requests:
            plan = world.step()
            assert plan.num_tokens <= 6, f"seed {seed} step {plan.step}: {world.table[-1]}"


def test_a_swapped_prompt_comes_back_with_the_tokens_that_decodes_leave() -> None:
    world = drive(
        "vllm",
        swap="swap",
        num_blocks=6,
        num_host_blocks=6,
        max_num_batched_tokens=4,
        max_num_seqs=3,
    )
    for name, prompt, max_tokens in (("a", 4, 4), ("c", 4, 4), ("b", 12, 2)):
        world.add(name, prompt, max_tokens)
    world.steps(4)  # b is swapped out after the first 2 tokens of its prompt; then a ends
    assert world.table[3] == Row("", "a c", (), "b", ())
    assert world.steps(1) == [Row("b", "c", (("b", 2, 5),))]  # 3 and 1 of a budget of 4


# The prefix cache


def test_a_prompt_with_one_token_left_is_a_chunk_that_samples_and_not_a_decode() -> None:
    world = drive(num_blocks=16, max_num_batched_tokens=8)
    a = world.add("a", 9, 2)
    world.step()
    plan = world.plan()
    assert a.state is State.DECODING and not plan.decodes
    assert plan.chunks[0][1:] == (8, 9, 8, True)
    world.finish(plan)
    assert a.num_generated == 1
    world.run()
    check_outputs(world)


def test_a_one_token_prompt_is_a_chunk_too() -> None:
    world = drive(num_blocks=16)
    world.add("a", 1, 2)
    assert world.run() == [Row("a", "", (("a", 0, 1),)), Row("", "a")]


def test_a_full_hit_computes_one_token_and_writes_nothing() -> None:
    world = drive(num_blocks=16)
    prompt = list(range(12))
    world.add("a", prompt, 1)
    world.run()
    b = world.add("b", prompt, 1)
    free = world.scheduler.num_free
    plan = world.plan()
    assert plan.chunks[0][1:] == (11, 12, 12, True)
    assert plan.events.num_free == free - 3  # the three blocks it found, and none besides
    world.finish(plan)
    assert b.history.num_cached == 11


def test_equal_prompts_in_one_step_share_their_blocks() -> None:
    world = drive(num_blocks=16)
    prompt = list(range(10))
    world.add("a", prompt, 2)
    world.add("b", prompt, 2)
    plan = world.step()
    assert world.table[-1].chunks == (("a", 0, 10), ("b", 8, 10))
    assert plan.events.num_free == 16 - 3 - 1


def test_a_shared_block_is_not_freed_while_another_request_uses_it() -> None:
    world = drive(num_blocks=16)
    prompt = list(range(8))
    world.add("a", prompt, 1)
    b = world.add("b", prompt, 6)
    world.step()
    assert world.requests["a"].is_finished
    assert all(world.scheduler.kv.pool.refs[block] == 1 for block in b.kv.blocks)
    world.run()
    world.check_empty()


def test_generated_tokens_are_found_again_in_the_next_turn_of_a_conversation() -> None:
    world = drive(num_blocks=32)
    a = world.add("a", 6, 11)
    world.run()
    world.add("b", [*a.tokens, 1, 2, 3], 1)  # 20 tokens; 16 of a's 17 were stored
    plan = world.step()
    assert plan.admitted[0].num_cached == 16


def test_salt_keeps_equal_prompts_apart() -> None:
    world = drive(num_blocks=32)
    for name, salt in (("a", ""), ("b", "x"), ("c", "x")):
        world.add(name, range(9), 1, salt=salt)
        world.run()
    starts = [row.chunks[0][1] for row in world.table]
    assert starts == [0, 0, 8]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    world = drive(num_blocks=32)
    world.add("a", range(12), 1)
    world.run()
    b = world.add("b", range(12), 1, reads_cache=False)
    assert world.run() == [Row("b", "", (("b", 0, 12),))]
    assert b.history.num_cached == 0


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_even_if_preempted() -> None:
    world = drive(num_blocks=16, max_num_batched_tokens=8)
    world.add("a", range(16), 1)
    world.run()  # 4 blocks are cached
    b = world.add("b", range(16), 1, reads_cache=False)
    computed: set[int] = set()
    preempted_at: list[int] = []
    while not b.is_finished:
        plan = world.step()
        computed |= {p for c in plan.chunks if c.request is b for p in range(c.start, c.end)}
        if b.state is State.PREFILL and not preempted_at:
            preempted_at.append(b.num_computed)
            world.scheduler.state.preempt(b)
    assert preempted_at == [8]
    assert computed == set(range(16))


def test_statistics_of_the_cache_are_counted_once_per_admission() -> None:
    world = drive(num_blocks=6, max_num_seqs=3)
    world.add("warm", range(8), 1)
    world.run()
    world.add("a", [*range(8), 50], 12)
    b = world.add("b", [*range(8), 60], 12)
    seen = []
    while world.scheduler.requests:
        seen += [(a.request.id, a.is_resume) for a in world.step().admitted]
    assert seen.count(("b", False)) == 1
    assert seen.count(("b", True)) == b.history.num_preemptions > 0
    assert b.history.num_cached == 8  # of its first admission, whatever came later


def test_a_blocked_head_is_not_hashed_again_at_every_step() -> None:
    world = drive(num_blocks=12)
    world.add("a", 8, 20)
    world.step()
    head = world.add("head", 44, 2)
    world.step()
    keys, objects = head.kv.keys, list(head.kv.keys)
    world.steps(5)
    assert head.kv.keys is keys and len(keys) == 11
    assert all(now is before for now, before in zip(keys, objects, strict=True))


def test_a_failed_admission_changes_nothing() -> None:
    world = drive(num_blocks=6)
    world.add("warm", range(8), 1)
    world.run()
    world.add("a", 12, 8)
    world.step()
    pool = world.scheduler.kv.pool
    before = (list(pool.refs), list(pool.index.key_of))
    head = world.add("head", [*range(8), *range(50, 58)], 1)  # 2 hits and 2 new; 3 are free
    plan = world.plan()
    assert plan.blocked == [Blocked(head, "blocks", 4, 2)]  # a took one block more
    world.finish(plan)
    assert sum(pool.refs) == sum(before[0]) + 1 and head.kv.blocks == []
    kept = [key for key in before[1] if key is not None]
    assert all(key in pool.index.block_of for key in kept)


# Overlap: plans in flight


def test_the_token_in_flight_of_a_preempted_request_still_reaches_it() -> None:
    world = drive(num_blocks=3)
    world.add("a", 4, 6)
    b = world.add("b", 4, 4)
    first = world.plan()
    second = world.plan()  # b must go while its first token is on the device
    assert world.table[-1] == Row("", "a", (), "b")
    assert b.state is State.WAITING and b.num_generated == 0
    world.finish(first)
    assert b.num_generated == 1
    world.finish(second)
    run_overlapped(world)
    check_outputs(world)
    world.check_empty()


def test_a_preempted_request_is_not_resumed_before_its_token_is_known() -> None:
    world = drive(num_blocks=3)
    world.add("a", 4, 2)
    b = world.add("b", 4, 4)
    first = world.plan()
    second = world.plan()  # a gets its last token, b is sent back
    world.finish(first)
    third = world.plan()
    assert names(p.request for p in third.events.preempted) == "" and not third.admitted
    world.finish(second)
    run_overlapped(world)
    check_outputs(world)
    assert b.finish_reason == "length"


def test_a_finish_seen_late_drops_the_extra_token() -> None:
    world = drive(num_blocks=8, sample=lambda r, place: 7 if place == 5 else 1)
    a = world.add("a", 4, 8, eos_ids=frozenset({7}))
    first, second = world.plan(), world.plan()  # the second samples place 5
    world.finish(first)
    third = world.plan()
    world.finish(second)
    assert a.is_finished and a.tokens.tolist()[4:] == [1, 7]
    report = world.finish(third)
    assert list(report.outputs()) == [] and report.finished == []
    assert a.num_generated == 2
    world.check_empty()


def test_a_length_known_at_planning_time_is_never_overrun() -> None:
    world = drive(num_blocks=8)
    a = world.add("a", 4, 2)
    world.plan()
    world.plan()
    while world.scheduler.in_flight:
        assert world.plan().is_empty if len(world.scheduler.in_flight) < 2 else True
        world.finish(world.scheduler.in_flight[0])
    assert a.num_generated == 2


@pytest.mark.parametrize("num_done", [0, 1])
def test_an_abort_in_flight_frees_each_block_once(num_done: int) -> None:
    world = drive(num_blocks=8, max_num_batched_tokens=8)
    a = world.add("a", 12, 4)
    b = world.add("b", 4, 4)
    plans = [world.plan(), world.plan()]
    for plan in plans[:num_done]:
        world.finish(plan)
    assert world.scheduler.abort("a")
    assert world.scheduler.num_free == 8 - len(b.kv.blocks)
    assert not world.scheduler.abort("a")
    for plan in plans[num_done:]:
        assert a not in dict(world.finish(plan).outputs())
    run_overlapped(world)
    assert a.finish_reason == "abort" and b.finish_reason == "length"
    check_outputs(world)
    world.check_empty()


def test_a_prompt_in_flight_is_continued_and_not_scheduled_twice() -> None:
    world = drive(num_blocks=16, max_num_batched_tokens=8)
    world.add("a", 20, 1)
    first, second = world.plan(), world.plan()
    assert [row.chunks for row in world.table] == [(("a", 0, 8),), (("a", 8, 16),)]
    world.finish(first)
    world.finish(second)
    world.run()
    check_outputs(world)


@pytest.mark.parametrize("overlapped", [False, True])
def test_random_policies_aborts_and_resets_deliver_each_token_once_and_leak_nothing(
    overlapped: bool,
) -> None:
    for seed in range(60):
        world, flying = random_world(seed), deque[Plan]()
        rng = random.Random(seed)
        for turn in range(5_000):
            if turn % 2 == 0 and turn < 40:
                add_random(world, str(turn), rng)
            if rng.random() < 0.03 and world.scheduler.requests:
                world.scheduler.abort(rng.choice(list(world.scheduler.requests)))
            if rng.random() < 0.03:
                world.scheduler.reset_cache(force=True)
            if not world.scheduler.requests and not flying and turn >= 40:
                break
            plan = world.plan()
            assert plan.events.num_running <= world.scheduler.config.max_num_seqs
            if not plan.is_empty:
                flying.append(plan)
            if flying and (plan.is_empty or len(flying) == 1 + overlapped):
                world.finish(flying.popleft())
            elif plan.is_empty:
                assert not world.scheduler.requests, f"seed {seed}: stuck"
        else:
            raise AssertionError(f"seed {seed}: a hang")
        check_outputs(world)
        world.check_empty()


def random_world(seed: int) -> Drive:
    rng = random.Random(seed)
    return drive(
        recipe=rng.choice(("mixed", "swapped_first", "prefill_first", "charged_in_full", "static")),
        queue=rng.choice(
            ("fcfs", "fcfs(3)", "priority(preempts=True)", "shortest_first", "fair(2)", "deadline")
        ),
        chunk=rng.choice(("split_first", "split_any", "at_most(3)")),
        headroom=rng.choice(
            ("watermark(0.1)", "reserve_outputs(0.5)", "future_peak", "back_off(share=0.2)")
        ),
        victim=rng.choice(
            ("newest", "least_work", "lowest_priority", "fewest_lost", "served_last")
        ),
        swap=rng.choice(("recompute", "swap", "cheaper")),
        block_size=rng.choice((1, 2, 4)), num_blocks=24, num_host_blocks=rng.choice((0, 9, 40)),
        max_num_seqs=5, max_num_batched_tokens=rng.choice((5, 12, 40)), num_scheduler_steps=rng.choice((1, 1, 3)),
    )  # fmt: skip


def add_random(world: Drive, name: str, rng: random.Random) -> None:
    stem = range(rng.choice((0, 3, 8)))
    own = range(100 * len(world.requests), 100 * len(world.requests) + rng.randrange(1, 8))
    world.add(
        name, [*stem, *own], rng.randrange(1, 9), priority=rng.randrange(3),
        client=rng.choice("xyz"), arrival=float(len(world.requests)),
        deadline=rng.choice((None, 5.0)), reads_cache=rng.random() < 0.8,
    )  # fmt: skip


# Faults and resets


def test_an_executor_failure_ends_what_was_in_flight_and_nothing_else() -> None:
    world = drive(num_blocks=8, max_num_seqs=2)
    a = world.add("a", 4, 4)
    b = world.add("b", 4, 4)
    c = world.add("c", 4, 4)
    world.step()
    world.plan()
    world.scheduler.fail("device lost")
    news = world.scheduler.take_pending_events()
    assert news is not None and news.finished == [a, b]
    assert all(r.finish_reason == "error" and r.error == "device lost" for r in (a, b))
    assert not c.is_finished and world.scheduler.num_free == 8
    world.run()
    assert c.finish_reason == "length"
    check_outputs(world)
    world.check_empty()


def test_after_a_failure_nothing_that_was_cached_is_trusted() -> None:
    world = drive(num_blocks=16)
    world.add("a", range(8), 4)
    world.step()
    world.plan()
    world.scheduler.fail("device lost")
    world.add("b", range(8), 1)
    assert world.steps(1)[0].chunks == (("b", 0, 8),)


def test_a_failure_with_two_plans_in_flight_and_a_swap_leaves_no_leak() -> None:
    world = drive("vllm", swap="swap", num_blocks=6, num_host_blocks=6)
    world.add("a", 10, 5)
    world.add("b", 10, 4)
    world.steps(2)
    world.plan()
    world.plan()  # b is on its way to the host
    assert world.requests["b"].state is State.SWAPPED
    world.scheduler.fail("device lost")
    world.add("c", 4, 2)
    world.run()
    world.check_empty()


def test_a_cache_reset_refuses_while_blocks_are_held() -> None:
    world = drive(num_blocks=16)
    world.add("a", range(8), 3)
    world.step()
    assert not world.scheduler.reset_cache()
    world.run()
    assert world.scheduler.reset_cache()
    world.add("b", range(8), 1)
    assert world.steps(1)[0].chunks == (("b", 0, 8),)


def test_a_forced_cache_reset_requeues_in_order_and_loses_no_token() -> None:
    world = drive(num_blocks=32, max_num_seqs=3)
    for name in "abcd":
        world.add(name, 6, 5)
    world.steps(2)
    assert world.scheduler.reset_cache(force=True)
    assert not world.scheduler.running and world.scheduler.num_free == 32
    row = world.steps(1)[0]
    assert row.admitted == "a b c" and row.chunks == (("a", 0, 8), ("b", 0, 8), ("c", 0, 8))
    world.run()
    check_outputs(world)


def test_a_reset_with_a_plan_in_flight_is_refused() -> None:
    world = drive(num_blocks=32)
    world.add("a", 6, 5)
    plan = world.plan()
    assert not world.scheduler.reset_cache(force=True)
    world.finish(plan)
    assert world.scheduler.reset_cache(force=True)
    world.run()
    check_outputs(world)


# Priority


def test_a_waiting_high_priority_request_does_not_wait_200_steps() -> None:
    world = drive(queue="priority(preempts=True)", num_blocks=64, max_num_seqs=1)
    world.add("low", 4, 210, priority=9)
    world.steps(3)
    world.add("high", 4, 2, priority=0)
    assert world.steps(1)[0] == Row("high", "", (("high", 0, 4),), "low", ())
    world.run()
    check_outputs(world)


def test_a_low_priority_ages_past_a_stream_of_high_ones() -> None:
    world = drive(queue="priority(aging=5.0)", num_blocks=64, max_num_seqs=1)
    world.add("low", 4, 1, priority=2, arrival=0.0)
    admitted = []
    for step in range(20):
        world.add(f"high{step}", 4, 1, priority=0, arrival=float(step))
        admitted.append(world.steps(1)[0].admitted)
    assert admitted.index("low") == 10  # two levels are worth ten seconds


def test_blocked_for_blocks_a_high_priority_sends_back_as_many_as_it_takes() -> None:
    world = drive(
        queue="priority(preempts=True)", victim="served_last", num_blocks=8, max_num_seqs=8
    )
    for number in range(4):
        world.add(str(number), 7, 8, priority=number + 1)  # 2 blocks each: full
    world.step()
    world.add("urgent", 14, 2, priority=0)  # 4 blocks
    row = world.steps(1)[0]
    assert row.admitted == "urgent" and row.preempted == "3 2" and row.decodes == "0 1"
    world.run()
    check_outputs(world)


# Counts


def test_counts_of_unfinished_requests_are_exact_after_add_and_abort() -> None:
    world = drive(num_blocks=16, max_num_seqs=2)
    for number in range(5):
        world.add(str(number), 4, 3)
        assert len(world.scheduler.requests) == number + 1
    plan = world.step()
    assert (plan.events.num_running, plan.events.num_waiting) == (2, 3)
    assert world.scheduler.abort("0") and world.scheduler.abort("4")
    assert not world.scheduler.abort("nobody")
    assert set(world.scheduler.requests) == {"1", "2", "3"}
    plan = world.step()
    assert (plan.events.num_running, plan.events.num_waiting) == (2, 1)
    assert names(plan.events.aborted) == "0 4"
    world.run()
    world.check_empty()


def test_blocks_are_free_in_the_step_after_their_request_ended() -> None:
    world = drive(num_blocks=4)
    world.add("a", 16, 1)
    world.add("b", 16, 1)
    assert [row.admitted for row in world.run()] == ["a", "b"]


def test_no_two_requests_hold_one_block_unless_they_share_its_content() -> None:
    world = drive(num_blocks=8, max_num_seqs=4)
    for number in range(8):
        world.add(str(number), 5, 9)
    while world.scheduler.requests:
        world.step()
        held: list[int] = []
        for request in world.scheduler.running:
            held += request.kv.blocks
        assert len(held) == len(set(held)) == 8 - world.scheduler.num_free


def test_samples_of_one_prompt_wait_for_the_one_that_computes_it() -> None:
    world = drive(num_blocks=16, max_num_batched_tokens=8)
    parent = world.add("0", range(12), 2)
    for name in "12":
        world.add(name, range(12), 2, parent=parent)
    assert world.steps(2) == [
        Row("0", "", (("0", 0, 8),), "", ()),
        Row("", "", (("0", 8, 12),), "", (("1", "order"), ("2", "order"))),
    ]
    assert world.steps(1)[0].chunks == (("1", 11, 12), ("2", 11, 12))
    world.run()
    world.check_empty()


def test_a_finished_request_is_refused_and_does_not_break_the_others() -> None:
    world = drive(num_blocks=16)
    a = world.add("a", 4, 1)
    world.run()
    with pytest.raises(RequestError):
        world.scheduler.add(a)


def test_after_a_failure_everybody_gets_all_its_tokens() -> None:
    world = drive(num_blocks=16, max_num_seqs=2)
    world.add("a", 4, 4)
    world.step()
    world.plan()
    world.scheduler.fail("device lost")
    c = world.add("c", 4, 4)
    world.run()
    assert c.tokens.tolist()[4:] == [count_up(c, place) for place in range(4, 8)]
