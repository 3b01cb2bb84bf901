"""How requests end: stop tokens, lengths, aborts; and the allowed state transitions."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

from headway.errors import InvalidRequest
from headway.request import TRANSITIONS, Request, RequestParams, RequestState
from tests.support.drive import Driver, small_driver

EOS = 2


def make_driver(output: list[int], **changes: Any) -> Driver:
    """A driver that samples `output` for every request, and 9 after it."""

    def sample(request: Request, place: int) -> int:
        at = place - request.num_prompt
        return output[at] if at < len(output) else 9

    numbers = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Driver("vllm_v1", sample=sample, **{**numbers, **changes})


def answer(output: list[int], max_tokens: int | None = 8, **params: Any) -> Request:
    driver = make_driver(output, max_model_len=params.pop("max_model_len", 64))
    request = driver.add("a", 4, max_tokens, **params)
    driver.run()
    driver.check_empty()
    return request


def generated(request: Request) -> list[int]:
    return request.tokens[request.num_prompt :].tolist()


def test_eos_ends_a_request_and_is_its_last_token() -> None:
    a = answer([5, EOS, 7], eos_ids=frozenset({EOS}))
    assert generated(a) == [5, EOS]
    assert (a.finish_reason, a.stop_token) == ("stop", EOS)


def test_any_of_several_eos_tokens_ends_a_request() -> None:
    a = answer([5, 3, EOS], eos_ids=frozenset({EOS, 3}))
    assert generated(a) == [5, 3] and a.stop_token == 3


def test_eos_as_the_first_token_ends_a_request() -> None:
    a = answer([EOS], eos_ids=frozenset({EOS}))
    assert generated(a) == [EOS] and a.finish_reason == "stop"


def test_the_stop_id_that_ends_a_request_is_recorded() -> None:
    a = answer([5, 11, 12], eos_ids=frozenset({EOS}), stop_ids=frozenset({12, 11}))
    assert generated(a) == [5, 11] and a.stop_token == 11


def test_ignore_eos_continues_after_eos_but_not_after_a_stop_id() -> None:
    a = answer([EOS, EOS, 11], eos_ids=frozenset({EOS}), stop_ids=frozenset({11}), ignore_eos=True)
    assert generated(a) == [EOS, EOS, 11] and a.stop_token == 11


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 1), (2, 2), (3, 5), (5, 5)])
def test_eos_before_min_tokens_does_not_stop(min_tokens: int, length: int) -> None:
    a = answer([EOS, EOS, 5, 5, EOS], eos_ids=frozenset({EOS}), min_tokens=min_tokens)
    assert a.num_generated == length and a.finish_reason == "stop"


def test_a_stop_id_before_min_tokens_does_not_stop() -> None:
    a = answer([11, 5, 11], stop_ids=frozenset({11}), min_tokens=2)
    assert generated(a) == [11, 5, 11]


def test_a_request_ends_after_exactly_max_tokens() -> None:
    for max_tokens in (1, 2, 5, 9):
        a = answer([], max_tokens)
        assert a.num_generated == max_tokens
        assert (a.finish_reason, a.stop_token) == ("length", None)


def test_eos_as_the_last_allowed_token_has_finish_reason_stop() -> None:
    a = answer([5, 5, EOS], 3, eos_ids=frozenset({EOS}))
    assert (a.finish_reason, a.stop_token, a.num_generated) == ("stop", EOS, 3)


def test_max_model_len_ends_a_request_without_max_tokens() -> None:
    a = answer([], None, max_model_len=10)
    assert len(a.tokens) == 10 and a.finish_reason == "length"


def test_a_request_with_min_tokens_above_max_tokens_ends_at_max_tokens() -> None:
    a = answer([EOS, EOS, EOS], 2, eos_ids=frozenset({EOS}), min_tokens=9)
    assert a.num_generated == 2 and a.finish_reason == "length"


def test_a_negative_min_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        make_driver([]).add("a", 4, 4, min_tokens=-1)


def test_eos_tokens_are_per_request() -> None:
    driver = make_driver([5, EOS, 5, 5])
    a = driver.add("a", 4, 4, eos_ids=frozenset({EOS}))
    b = driver.add("b", 4, 4)
    driver.run()
    assert (a.num_generated, b.num_generated) == (2, 4)


def outputs_of(driver: Driver) -> list[dict[Request, list[int]]]:
    """The tokens that requests gain in each step of a run to its end."""
    driver.run()
    return [dict(completed.outputs()) for completed in driver.events.completed]


def test_tokens_of_a_multi_step_plan_after_a_stop_are_dropped() -> None:
    driver = make_driver([5, 6, EOS, 7, 8], num_scheduler_steps=8)
    a = driver.add("a", 4, 8, eos_ids=frozenset({EOS}))
    b = driver.add("b", 4, 8)
    outputs = outputs_of(driver)
    assert generated(a) == [5, 6, EOS] and a.finish_reason == "stop"
    assert generated(b) == [5, 6, EOS, 7, 8, 9, 9, 9]
    assert [len(output.get(a, [])) for output in outputs] == [1, 2]
    assert [token for output in outputs for token in output.get(a, [])] == generated(a)
    assert [token for output in outputs for token in output.get(b, [])] == generated(b)
    driver.check_empty()


def test_tokens_of_a_multi_step_plan_after_max_tokens_are_dropped() -> None:
    driver = make_driver([], num_scheduler_steps=8)
    requests = [driver.add(str(n), 4, n) for n in range(1, 5)]
    outputs = outputs_of(driver)
    assert [r.num_generated for r in requests] == [1, 2, 3, 4]
    for r in requests:
        assert [token for output in outputs for token in output.get(r, [])] == generated(r)
    driver.check_empty()


def test_a_plan_has_one_step_while_requests_wait() -> None:
    driver = make_driver([], num_scheduler_steps=8, max_num_seqs=1)
    driver.add_all(a=(4, 8), b=(4, 8))
    driver.step()
    assert driver.step().num_steps == 1


@pytest.mark.parametrize("num_scheduler_steps", [1, 3, 8])
def test_each_output_is_reported_once_and_finished_once(num_scheduler_steps: int) -> None:
    driver = make_driver([5, 6, 7, EOS], num_scheduler_steps=num_scheduler_steps)
    for number in range(6):
        eos = frozenset({EOS}) if number % 2 else frozenset[int]()
        driver.add(str(number), 3 + number, 2 + number, eos_ids=eos)
    gained: dict[Request, list[int]] = {}
    for output in outputs_of(driver):
        for request, tokens in output.items():
            gained.setdefault(request, []).extend(tokens)
    assert sorted(r.id for r in driver.events.ended) == sorted(driver.requests)
    assert all(gained[r] == generated(r) for r in driver.requests.values())


def test_states_change_only_along_the_listed_transitions() -> None:
    for before, after in product(RequestState, RequestState):
        request = Request("a", [1], RequestParams())
        request.state = before
        if after in TRANSITIONS[before]:
            request.move(after)
            assert request.state is after
        else:
            with pytest.raises(AssertionError, match="cannot become"):
                request.move(after)
            assert request.state is before


def test_every_state_may_become_finished_and_finished_is_final() -> None:
    assert TRANSITIONS[RequestState.FINISHED] == frozenset()
    others = set(RequestState) - {RequestState.FINISHED}
    assert all(RequestState.FINISHED in TRANSITIONS[state] for state in others)


def test_requests_with_swaps_change_state_only_along_the_listed_transitions() -> None:
    driver = small_driver(
        "vllm", swap="swap", num_blocks=6, num_host_blocks=6, max_num_seqs=3,
        max_num_batched_tokens=8,
    )  # fmt: skip
    requests = [driver.add(name, 10, 6) for name in "abc"]
    states: dict[str, list[RequestState]] = {r.id: [r.state] for r in requests}
    while driver.scheduler.requests:
        plan = driver.plan()
        for r in requests:
            states[r.id].append(r.state)
        driver.finish(plan)
        for r in requests:
            states[r.id].append(r.state)
    assert any(RequestState.SWAPPED in seen for seen in states.values())
    for seen in states.values():
        for before, after in pairwise(seen):
            # A short prompt passes PREFILL within one call of plan().
            direct = before is after or after in TRANSITIONS[before]
            assert direct or (
                RequestState.PREFILL in TRANSITIONS[before] and after is RequestState.DECODING
            )
        assert seen[-1] is RequestState.FINISHED


def test_abort_while_waiting_removes_the_request() -> None:
    driver = make_driver([], max_num_seqs=1)
    _, b = driver.add_all(a=(4, 4), b=(4, 4))
    driver.step()
    assert b.state is RequestState.WAITING and driver.scheduler.abort("b")
    assert b.is_finished and b.finish_reason == "abort"
    driver.run()
    driver.check_empty()


def test_abort_of_a_partially_prefilled_prompt_frees_its_blocks() -> None:
    driver = make_driver([], max_num_batched_tokens=8)
    a = driver.add("a", 20, 4)
    driver.step()
    assert a.state is RequestState.PREFILL and driver.scheduler.abort("a")
    assert driver.scheduler.num_free == 64
    driver.check_empty()


def test_abort_while_decoding_keeps_the_output() -> None:
    driver = make_driver([5, 6, 7])
    a = driver.add("a", 4, 8)
    for _ in range(3):
        driver.step()
    assert a.state is RequestState.DECODING and driver.scheduler.abort("a")
    assert generated(a) == [5, 6, 7]
    driver.check_empty()


def test_abort_while_swapped_frees_the_host_blocks() -> None:
    driver = small_driver("vllm", swap="swap", num_blocks=6, num_host_blocks=6, max_num_seqs=3)
    _, b = driver.add_all(a=(10, 5), b=(10, 4))
    driver.steps(4)
    assert b.state is RequestState.SWAPPED and driver.scheduler.abort("b")
    driver.run()
    driver.check_empty()


def test_abort_of_a_finished_request_does_nothing() -> None:
    driver = make_driver([])
    a = driver.add("a", 4, 1)
    driver.run()
    assert not driver.scheduler.abort("a") and a.finish_reason == "length"


def test_abort_with_an_error_records_the_reason() -> None:
    driver = make_driver([])
    a = driver.add("a", 4, 4)
    driver.step()
    driver.scheduler.abort("a", "error", "invalid input")
    assert (a.finish_reason, a.error) == ("error", "invalid input")
    assert driver.events.ended == [a]
