"""Laws of the service counters, of overtaking and of reserved rows, each stated by itself."""

from __future__ import annotations

import random

import pytest

from headway.request import Request, RequestParams
from headway.scheduler import fairness
from tests.support.drive import small_driver


def of_group(group: str, num_prompt: int = 10) -> Request:
    request = Request(group, range(num_prompt), RequestParams(max_tokens=50))
    request.history.group, request.limit = group, num_prompt + 50
    return request


def counters_of(**served: float) -> fairness.ServiceCounters:
    """Counters with one active request for each group."""
    counters = fairness.ServiceCounters()
    for group in served:
        counters.arrive(group)
    counters.served.update(served)
    return counters


def test_service_is_the_prompt_once_and_twice_the_sampled_tokens() -> None:
    request = of_group("a", 10)
    request.prefill_end = 10
    for num_computed, num_sampled in ((0, 0), (4, 0), (9, 0), (10, 1), (12, 3)):
        request.computed_base = num_computed
        assert fairness.weighted_tokens(request) == 10 + 2 * num_sampled
    request.history.num_preemptions, request.prefill_end = 1, 13  # resumed: its prompt is paid
    assert fairness.weighted_tokens(request) == 0
    request.computed_base = 13
    assert fairness.weighted_tokens(request) == 2


def test_running_requests_count_before_they_are_charged() -> None:
    counters, first, second = counters_of(a=5.0, b=7.0), of_group("a"), of_group("b", 3)
    first.prefill_end, second.prefill_end = 10, 3
    assert counters.service([first]) == {"a": 15.0, "b": 7.0}
    counters.start(second)  # the same step: added to what was computed
    assert counters.service([first, second]) == {"a": 15.0, "b": 10.0}
    assert counters.served == {"a": 5.0, "b": 7.0}
    first.computed_base = 12
    assert counters.service([first, second])["a"] == 15.0  # running ones are read once per step
    counters.start_step()
    assert counters.service([first, second])["a"] == 21.0
    counters.charge(first)
    assert counters.served == {"a": 21.0, "b": 7.0}
    assert counters.service([second]) == {"a": 21.0, "b": 10.0}


def test_a_group_that_returns_starts_level_with_the_least_served_active_group() -> None:
    counters = counters_of(a=100.0, b=40.0, c=70.0)
    counters.arrive("new")
    assert counters.served["new"] == 40.0
    counters.depart("c", 0)
    counters.served["b"] = counters.served["new"] = 90.0
    counters.arrive("c")  # had less than all: no credit for its pause
    assert counters.served["c"] == 90.0
    counters.depart("a", 0)
    counters.arrive("a")  # had more than all: its debt stays
    assert counters.served["a"] == 100.0


def test_a_group_with_a_request_in_the_system_is_not_lifted() -> None:
    counters = counters_of(a=100.0, b=0.0)
    counters.arrive("c")
    counters.served["c"] = 3.0
    counters.arrive("b")
    assert counters.served["b"] == 0.0
    counters.depart("b", 0)  # one of two: still active
    counters.served["c"] = 50.0
    counters.arrive("b")
    assert counters.served["b"] == 0.0


def test_the_last_group_to_leave_sets_the_level_of_an_empty_system() -> None:
    counters = counters_of(a=100.0, b=40.0)
    counters.depart("a", 0)
    counters.depart("b", 0)
    counters.arrive("new")
    assert counters.served["new"] == 40.0
    counters.served["new"] = 10.0
    counters.depart("new", 0)
    counters.arrive("other")  # the level never falls
    assert counters.served["other"] == 40.0


def test_idle_groups_are_forgotten_the_least_served_first_and_active_ones_never() -> None:
    counters = fairness.ServiceCounters()
    counters.arrive("active")
    for number in range(fairness.MAX_IDLE + 1):
        counters.arrive(f"g{number}")
        counters.served[f"g{number}"] = 1.0 + number
        assert len(counters.served) == number + 2  # none is forgotten up to the maximum
        counters.depart(f"g{number}", 0)
    assert fairness.MAX_IDLE == 1024
    num_left = fairness.MAX_IDLE + 1 - fairness.MAX_IDLE // 2
    assert set(counters.served) == {"active"} | {
        f"g{number}" for number in range(fairness.MAX_IDLE // 2, fairness.MAX_IDLE + 1)
    }
    assert len(counters.served) == num_left + 1


def test_a_prompt_may_be_overtaken_up_to_its_service_less_what_is_left_of_it() -> None:
    """A request that overtakes has, with its own tokens, no more than the prompt has had so far."""
    prompt = of_group("a", 100)
    prompt.prefill_end = 100
    for num_computed in (0, 30, 99, 100):
        prompt.computed_base = num_computed
        left = 100 - num_computed
        assert fairness.overtaking_limit(prompt, {"a": 250.0, "b": 9.0}) == 250.0 - left
    prompt.prefill_end = 90  # decoding already
    assert fairness.overtaking_limit(prompt, {"a": 250.0}) == 250.0


@pytest.mark.parametrize("length, overtakes", ((29, True), (30, True), (31, False)))
def test_a_request_overtakes_only_if_it_is_no_longer_than_what_the_prompt_has_had(
    length: int, overtakes: bool
) -> None:
    world = small_driver(queue="fair", num_blocks=400, max_num_seqs=8, max_num_batched_tokens=10)
    world.add("long", 200, 2, client="heavy")
    world.steps(3)
    small = world.add("small", length, 2, client="light")
    # Both start level: the heavy client's service is 200, 170 of which are still to come.
    world.scheduler.queue.counters.served["client light"] = 0.0
    row = world.steps(1)[0]
    assert (row.admitted == "small") is overtakes
    assert [chunk[0] for chunk in row.chunks] == (["small"] if overtakes else ["long"])
    assert small.history.num_overtaken == 0


def test_requests_that_overtake_are_computed_before_all_partial_prompts() -> None:
    world = small_driver(queue="fair", num_blocks=400, max_num_seqs=16, max_num_batched_tokens=10)
    world.add("long", 200, 2, client="heavy")
    world.steps(5)
    world.add("small", 25, 2, client="light")
    order = [[chunk[0] for chunk in row.chunks] for row in world.steps(3)]
    assert order == [["small"], ["small"], ["small", "long"]]


def test_the_first_partial_prompt_is_overtaken_by_what_may_overtake_it_and_not_the_next() -> None:
    """Two partial prompts: a small request may overtake only the second, which has no tokens left."""
    world = small_driver(
        queue="fair", chunk="at_most(5)", num_blocks=400, max_num_seqs=8, max_num_batched_tokens=10
    )
    first = world.add("first", 200, 2, client="a")
    second = world.add("second", 200, 2, client="b")
    world.steps(1)
    assert first.num_computed == second.num_computed == 5
    world.add("small", 4, 2, client="c")
    served = world.scheduler.queue.counters.served
    served.update({"client a": 0.0, "client b": 500.0, "client c": 100.0})
    assert fairness.overtaking_limit(first, {"client a": 200.0}) < 104.0
    assert fairness.overtaking_limit(second, {"client b": 700.0}) > 104.0
    row = world.steps(1)[0]
    assert row.chunks[0][0] == "first"


@pytest.mark.parametrize("max_num_seqs", (1, 7, 8, 15, 16, 24, 40))
def test_the_last_eighth_of_the_rows_is_for_groups_that_have_fewer(max_num_seqs: int) -> None:
    reserved, shared, alone = max_num_seqs // 8, counters_of(a=0.0, b=0.0), counters_of(a=0.0)
    for num_own in range(max_num_seqs):
        for num_others in range(max_num_seqs - num_own):
            running = [of_group("a") for _ in range(num_own)]
            running += [of_group("b") for _ in range(num_others)]
            free = max_num_seqs - len(running)
            blocked = fairness.check_reserved_rows(of_group("a"), running, max_num_seqs, shared, 0)
            if free > reserved or num_own < reserved:
                assert blocked is None
            else:
                assert blocked is not None and blocked.reason == "reserved_rows"
                assert (blocked.need, blocked.have) == (reserved + 1, free)
            assert (
                fairness.check_reserved_rows(of_group("a"), running, max_num_seqs, alone, 0) is None
            )


def test_a_group_is_alone_some_steps_after_the_last_request_of_any_other() -> None:
    counters = counters_of(a=0.0, b=0.0, c=0.0)
    counters.depart("c", 0)
    counters.depart("b", 100)
    assert fairness.RECENT_STEPS == 4096
    end = 100 + fairness.RECENT_STEPS
    assert not counters.is_alone(end - 1)
    counters.depart("a", end - 1)
    counters.arrive("a")  # its own pause does not count
    assert not counters.is_alone(end - 1) and counters.is_alone(end)
    counters.arrive("c")
    assert not counters.is_alone(end)
    counters.depart("a", end)
    assert not counters.is_alone(end)


@pytest.mark.parametrize("seed", range(10))
def test_the_group_with_the_least_service_is_always_served_next(seed: int) -> None:
    """With rows for one request at a time, each admission is of a least served waiting group."""
    rng = random.Random(seed)
    world = small_driver(queue="fair", num_blocks=400, max_num_seqs=1)
    for number in range(12):
        world.add(f"r{number}", rng.randint(1, 20), rng.randint(1, 5), client=rng.choice("abc"))
    counters = world.scheduler.queue.counters
    while world.scheduler.requests:
        waiting = {request.history.group for request in world.scheduler.queue}
        before = dict(counters.served)
        plan = world.step()
        for admission in plan.admitted:
            least = min(before[group] for group in waiting if group is not None)
            assert before[str(admission.request.history.group)] == least
