"""The scheduler's laws hold with drafts, of which many are right and many are wrong.

The shadow executor checks every slot; each output must be that of the request running alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from headway import Plan, Scheduler, preset
from headway.errors import ExecutorError, PolicyError
from headway.plan import StepResult
from headway.request import Request, RequestParams
from tests.support.scenarios import Scenario, random_scenario, run
from tests.support.shadow import ShadowError, oracle

NUM_SEEDS = 150
MIN_EVENTS = {
    "drafts that were right": 400, "drafts that were wrong": 400, "ends within drafts": 40,
    "drafts beside decodes": 50, "drafts beside chunks": 30, "blocks for drafts": 200,
    "preempted, recomputed": 50, "aborts in flight": 5, "crashes": 5,
}  # fmt: skip


@pytest.mark.parametrize("has_window", [False, True])
def test_output_does_not_depend_on_drafts(has_window: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        for async_scheduling in (0, 1):
            scenario = random_scenario(
                seed, async_scheduling, has_window=has_window, has_drafts=True
            )
            try:
                seen += run(scenario)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {async_scheduling}: {error}") from error
    rare = {event: seen[event] for event, least in MIN_EVENTS.items() if seen[event] < least}
    assert not rare, f"too few of these events: {rare}"


class Knowing:
    """Drafts the output of requests whose parameters are known; `wrong` is added to every third."""

    def __init__(self, wrong: int = 0) -> None:
        self._wrong = wrong

    def propose(self, request: Request, most: int) -> list[int]:
        output, _ = oracle(request.prompt, request.params, 1 << 20)
        place = request.num_generated
        rest = output[place : place + most]
        return [t + self._wrong * (place % 3 == 2) for place, t in enumerate(rest, start=place)]

    def forget(self, request: Request) -> None:
        pass


def requests(count: int, max_tokens: int = 30) -> list[Request]:
    return [
        Request(str(n), [n, 1, 2], RequestParams(max_tokens=max_tokens, sampling=n))
        for n in range(count)
    ]


def steps_of(count: int, **changes: object) -> tuple[int, Counter[str]]:
    """The number of plans with work that some requests need."""
    config, plans = preset("vllm_v1", num_blocks=64, block_size=4, **changes), list[Plan]()
    seen = run(Scenario(config, 0, {0: requests(count)}), tamper=lambda plan, _: plans.append(plan))
    return len(plans), seen


def test_right_drafts_save_steps_and_wrong_ones_do_not_add_any() -> None:
    plain, _ = steps_of(3)
    right, _ = steps_of(3, draft="fixed(4)", drafter=lambda: Knowing())
    wrong, seen = steps_of(3, draft="fixed(4)", drafter=lambda: Knowing(wrong=1))
    assert plain == 30 and right == 1 + -(-29 // 5) and right < wrong <= plain
    assert seen["drafts that were wrong"] and seen["drafts that were right"]


def test_drafts_use_only_tokens_and_blocks_that_are_left() -> None:
    """They preempt no request, also where every block counts."""
    for num_blocks in range(9, 25):
        counts = {}
        for draft in ("none", "fixed(8)"):
            config = preset(
                "vllm_v1", draft=draft, drafter=lambda: Knowing(wrong=1), num_blocks=num_blocks,
                block_size=4, max_num_batched_tokens=16, max_num_seqs=3,
            )  # fmt: skip
            seen = run(Scenario(config, 0, {0: requests(3)}))
            counts[draft] = seen["preempted, recomputed"]
        assert counts["fixed(8)"] <= counts["none"]


def break_rows(plan: Plan, scheduler: Scheduler) -> None:
    for place, draft in enumerate(plan.drafts):
        plan.drafts[place] = replace(draft, start=draft.start - 1)


def lose_blocks(plan: Plan, scheduler: Scheduler) -> None:
    if plan.drafts:
        plan.new_blocks = []


@pytest.mark.parametrize("tamper", [break_rows, lose_blocks])
def test_a_wrong_plan_is_detected(tamper: object) -> None:
    config = preset(
        "vllm_v1", draft="fixed(4)", drafter=lambda: Knowing(), num_blocks=64, block_size=2
    )
    with pytest.raises(ShadowError):
        run(Scenario(config, 0, {0: requests(2)}), tamper=tamper)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[], [[1], [2]], [[1] * 6], [[]]])
def test_a_result_with_a_wrong_number_of_tokens_is_an_error(tokens: list[list[int]]) -> None:
    scheduler = Scheduler(preset("vllm_v1", draft="fixed(4)", drafter=lambda: Knowing()))
    (request,) = requests(1)
    scheduler.add(request)
    output, _ = oracle(request.prompt, request.params, 1 << 20)
    scheduler.complete(scheduler.schedule(), StepResult(first_tokens=[output[0]]))
    plan = scheduler.schedule()
    assert [draft.count for draft in plan.drafts] == [4] and not plan.decodes
    with pytest.raises(ExecutorError, match="drafts"):
        scheduler.complete(plan, StepResult(draft_tokens=tokens))


def test_no_plan_is_made_while_drafts_are_in_flight() -> None:
    scheduler = Scheduler(preset("vllm_v1", draft="fixed(2)", drafter=lambda: Knowing()))
    (request,) = requests(1)
    scheduler.add(request)
    output, _ = oracle(request.prompt, request.params, 1 << 20)
    first = scheduler.schedule()
    assert scheduler.schedule().is_empty  # it waits for the first token
    scheduler.complete(first, StepResult(first_tokens=[output[0]]))
    plan = scheduler.schedule()
    assert plan.drafts and scheduler.schedule().is_empty
    completed = scheduler.complete(plan, StepResult(draft_tokens=[output[1:4]]))
    assert dict(completed.outputs()) == {request: output[1:4]}
    assert (request.history.num_drafted, request.history.num_accepted) == (2, 2)
    assert request.num_computed == request.num_known - 1


def test_a_request_that_is_aborted_with_drafts_in_flight_gains_nothing() -> None:
    scheduler = Scheduler(preset("vllm_v1", draft="fixed(2)", drafter=lambda: Knowing()))
    (request,) = requests(1)
    scheduler.add(request)
    output, _ = oracle(request.prompt, request.params, 1 << 20)
    scheduler.complete(scheduler.schedule(), StepResult(first_tokens=[output[0]]))
    plan = scheduler.schedule()
    scheduler.abort(request.id)
    completed = scheduler.complete(plan, StepResult(draft_tokens=[output[1:4]]))
    assert not dict(completed.outputs()) and request.output.tolist() == [output[0]]
    assert scheduler.is_idle


class Broken(Knowing):
    """Returns or raises something."""

    def __init__(self, found: object) -> None:
        super().__init__()
        self._found = found

    def propose(self, request: Request, most: int) -> list[int]:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found  # type: ignore[return-value]


@pytest.mark.parametrize("found", [ValueError("no"), None, ["a"], [1.5], [-2], [1 << 31], 7])
def test_a_drafter_that_fails_ends_only_its_request(found: object) -> None:
    scheduler = Scheduler(preset("vllm_v1", draft="fixed(2)", drafter=lambda: Broken(found)))
    (request,) = requests(1)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule(), StepResult(first_tokens=[3]))
    with pytest.raises(PolicyError, match="drafter") as raised:
        scheduler.schedule()
    assert raised.value.request_id == request.id


def test_more_drafts_than_were_asked_for_are_left_out() -> None:
    scheduler = Scheduler(preset("vllm_v1", draft="fixed(2)", drafter=lambda: Broken([5] * 9)))
    (request,) = requests(1)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule(), StepResult(first_tokens=[3]))
    assert [draft.tokens for draft in scheduler.schedule().drafts] == [(5, 5)]
