"""A policy that raises, or an absurd value, fails only the request that it concerns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import signature
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import LLM, RequestOutput, SamplingParams, Scheduler, VirtualClock, preset
from headway.checks import MAX_PROMPT, MAX_STOPS, MAX_TOKEN_ID
from headway.engine.engine import MAX_FAULTS, MAX_SAMPLES, Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import EngineStopped, FromLoop, Refusal, Submit, TokenBatch
from headway.engine.queue_limits import QueueLimits
from headway.errors import (
    ConfigError,
    HeadwayError,
    InvalidRequest,
    PolicyError,
    RequestTooLong,
    shorten,
)
from headway.request import Request, RequestParams
from headway.scheduler.policies import queue as queues
from headway.scheduler.policies.presets import NUMBERS
from headway.scheduler.policy_calls import CHUNK, HEADROOM, SWAP, checked
from headway.scheduler.validate import MAX_SECONDS, MAX_WHOLE
from tests.support.drive import check_no_leaks
from tests.support.events import Events
from tests.support.journals import Recorder
from tests.support.served import server
from tests.support.shadow import ShadowExecutor, oracle
from tests.support.waiting import on_loop

SMALL = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])


class Broken(RuntimeError):
    """The error of a broken policy."""


def make(async_scheduling: int = 0, **changes: Any) -> Engine:
    scheduler = Scheduler(preset("vllm_v1", **{**SMALL, **changes}))
    return Engine(
        scheduler, ShadowExecutor(scheduler), VirtualClock(), async_scheduling=async_scheduling
    )


def params(seed: int = 0, max_tokens: int = 8, **more: Any) -> RequestParams:
    return RequestParams(max_tokens=max_tokens, sampling=seed, **more)


def is_poison(request: Request) -> bool:
    return request.id.startswith("poison") and request.sample == request.params.n - 1


def poisoned_key(request: Request, view: object) -> float:
    """Raises for the last sample of requests named poison."""
    if is_poison(request):
        raise Broken(f"no key for {request.id}")
    return request.arrival


@dataclass(frozen=True)
class poisoned_group(queues.Rule):
    """Like `fair`, but raises for the last sample of requests named poison."""

    def key(self, request: Request, view: object) -> Any:
        return request.arrival

    def group(self, request: Request) -> str:
        if is_poison(request):
            raise Broken(f"no group for {request.id}")
        return request.params.client


def poisoned_chunk(want: int, left: int, is_first: bool) -> int:
    if want == 12 + 7:  # all tokens of the poison, except the last one, which is never computed
        raise Broken("no chunk")
    return min(want, left)


POISONS: dict[str, dict[str, Any]] = {
    "key": {"queue": poisoned_key},
    "no order": {"queue": lambda request, view: "x" if is_poison(request) else request.arrival},
    "nan": {"queue": lambda request, view: (nan if is_poison(request) else 1.0, request.arrival)},
    "none": {"queue": lambda request, view: None if is_poison(request) else request.arrival},
    "group": {"queue": poisoned_group()},
    "chunk": {"chunk": poisoned_chunk},
}
each_poison = pytest.mark.parametrize("poison", POISONS)


def slot_of(poison: str) -> str:
    return next(iter(POISONS[poison]))


def trace_of(poison: str, async_scheduling: int, num_poisoned: int) -> list[bytes]:
    """The trace of a run; after every request, `num_poisoned` others are refused."""
    engine = make(async_scheduling, **POISONS[poison])
    recorder = Recorder(preset("vllm_v1", **SMALL), bool(async_scheduling))
    engine.observers.append(recorder)
    for number in range(9):
        more = {"client": "ab"[number % 2], "stop_ids": frozenset({number})}
        engine.add(str(number), [number] * (3 + number), params(number, n=1 + number % 2, **more))
        for count in range(num_poisoned):
            stops = frozenset({900 + count})
            with pytest.raises(PolicyError) as caught:
                engine.add(
                    f"poison {count}", [7] * 12, params(n=1 + count, client="c", stop_ids=stops)
                )
            assert caught.value.slot == slot_of(poison)
            assert not stops & engine.scheduler.state.stop_tokens.keys()
            assert "c" not in engine.scheduler.queue.counters.served
        engine.step()
    engine.run()
    check_no_leaks(engine.scheduler)
    return recorder.lines


@each_scheduling
@each_poison
def test_a_policy_error_for_one_request_does_not_change_the_trace(
    poison: str, async_scheduling: int
) -> None:
    traces = [trace_of(poison, async_scheduling, num_poisoned=count) for count in (3, 0)]
    assert traces[0] == traces[1]


def test_a_policy_error_names_slot_request_type_and_message() -> None:
    with pytest.raises(PolicyError, match="queue.*'poison'.*Broken.*no key") as caught:
        make(queue=poisoned_key).add("poison", [1], params())
    assert isinstance(caught.value.__cause__, Broken)
    assert (caught.value.slot, caught.value.request_id) == ("queue", "poison")


def raises_in_a_call(*given: object) -> Any:
    return json.loads("{")  # another module's line raises


@pytest.mark.parametrize("slot", ["batching", "queue", "chunk", "headroom", "victim", "swap"])
def test_a_policy_error_names_the_policy_and_its_line(slot: str) -> None:
    engine = make(**{"num_host_blocks": 9, slot: raises_in_a_call})
    line = raises_in_a_call.__code__.co_firstlineno + 1
    try:
        for number in range(9):  # more than the cache holds
            engine.add(str(number), [number] * 20, params(max_tokens=40))
        while engine.has_work and not engine.fault:
            engine.step()
        text = engine.fault or ""
    except PolicyError as error:
        text = str(error)
    assert f"{slot} policy {__name__}:raises_in_a_call failed" in text
    assert "JSONDecodeError: Expecting" in text and text.endswith(f"({__file__}:{line})")


@pytest.mark.parametrize("slot", ["headroom", "chunk"])
@pytest.mark.parametrize("result", [None, "5", nan, [1]])
def test_a_result_that_is_no_number_is_shown(slot: str, result: object) -> None:
    def wrong(*given: object) -> Any:
        return result

    kind: Any = {"headroom": HEADROOM, "chunk": CHUNK}[slot]
    arguments: list[Any] = [1, 2, True] if slot == "chunk" else [Request("a", [1], params()), None]
    with pytest.raises(
        PolicyError, match=f"{slot} policy .*wrong returned .*; return a number"
    ) as e:
        checked(kind, wrong)(*arguments)
    assert repr(result) in str(e.value)


@pytest.mark.parametrize("answer", ["recompute", "swap", "", "no"])
def test_a_swap_rule_may_return_no_text_but_discard(answer: str) -> None:
    """Every text but the empty one counts as true: "recompute" would swap."""
    request = Request("a", [1], params())
    with pytest.raises(PolicyError, match=f"swap policy .*{answer!r} for request 'a'; return True"):
        checked(SWAP, lambda request, view: answer)(request, None)
    accepted: list[Any] = ["discard", np.str_("discard"), True, 1, np.True_, False, 0, None]
    answers = [checked(SWAP, lambda request, view, a=a: a)(request, None) for a in accepted]
    assert answers == ["discard"] * 2 + [True] * 3 + [False] * 3


@each_poison
def test_a_loop_refuses_a_request_after_a_policy_error_and_continues(poison: str) -> None:
    messages: list[FromLoop] = []
    engine = make(**POISONS[poison])
    loop = EngineLoop(engine, messages.extend, QueueLimits(max_waiting_tokens=10_000))
    asked = {"a": [7] * 5, "poison": [7] * 12, "b": [7] * 6}
    loop.post([Submit(id, prompt, params()) for id, prompt in asked.items()])
    while loop._inbox or engine.has_work:  # stepped here: its thread would wait for more messages
        loop._read()
        engine.step()
        loop._flush()
    (refusal,) = [message for message in messages if isinstance(message, Refusal)]
    assert (refusal.id, refusal.kind) == ("poison", "PolicyError")
    assert refusal.fields["slot"] == slot_of(poison)
    gained = {id for message in messages if isinstance(message, TokenBatch) for id in message.ids}
    assert gained == {"a", "b"}
    assert not any(isinstance(message, EngineStopped) for message in messages)


LIMITS = {
    "max_waiting": QueueLimits(max_waiting=5),
    "max_waiting_tokens": QueueLimits(max_waiting_tokens=5 * 3),
    "max_per_client": QueueLimits(max_per_client=5),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_every_sample_counts_for_the_limits_of_the_queue(limit: str) -> None:
    messages: list[FromLoop] = []
    loop = EngineLoop(make(), messages.extend, LIMITS[limit])
    for id, n in (("a", 2), ("b", 4), ("c", 3), ("d", 1)):
        loop._submit(Submit(id, [7] * 3, params(n=n)))
    loop._flush()
    refused = {m.id: m.message for m in messages if isinstance(m, Refusal)}
    assert list(refused) == ["b", "d"], "two and three samples are five"
    assert "4 samples" in refused["b"]
    alone = EngineLoop(make(), messages.extend, LIMITS[limit])
    alone._submit(Submit("a", [7] * 3, params(n=9)))
    assert len(alone.engine.scheduler.queue) == 9, "an empty queue takes it, or it never runs"


def test_a_prompt_without_a_length_is_refused_by_a_loop_with_a_token_limit() -> None:
    messages: list[FromLoop] = []
    loop = EngineLoop(make(), messages.extend, QueueLimits(max_waiting_tokens=10))
    loop.post([Submit("a", 5, params())])  # type: ignore[arg-type]
    while loop._inbox:  # it reads for a limited time
        loop._read()
    loop._flush()
    (refusal,) = [message for message in messages if isinstance(message, Refusal)]
    assert refusal.kind == "InvalidRequest"


@on_loop
async def test_a_server_answers_500_after_a_policy_error_and_continues() -> None:
    def key(request: Request, view: object) -> float:
        return 1 / (request.num_prompt - 3)

    async with server(policies={"queue": key}) as served:
        for stream in (False, True):
            response = await served.post("/v1/completions", prompt="bad", stream=stream)
            assert response.status_code == 500
            error = response.json()["error"]
            assert error["code"] == "policy_failed" and error["type"] == "server_error"
            assert "queue" in error["message"] and "ZeroDivisionError" in error["message"]
        assert (await served.complete(prompt="good"))["choices"][0]["text"] == "GOOD"
        assert (await served.client.get("/health")).status_code == 200
        assert served.engine.stop_reason is None
        await served.settled()


def test_a_policy_error_offline_refuses_only_its_prompt(tiny: str) -> None:
    def key(request: Request, view: object) -> float:
        return 1 / (request.num_prompt - 3)

    asked = SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(tiny, num_blocks=50, queue=key) as llm:
        first, refused, last = llm.try_generate([[5] * 4, [5] * 3, [6] * 5], asked)
        assert isinstance(first, RequestOutput) and isinstance(last, RequestOutput)
        assert first.num_generated == last.num_generated == 4
        assert isinstance(refused, PolicyError)
        with pytest.raises(PolicyError, match="ZeroDivisionError"):
            llm.generate([5] * 3, asked)
        with pytest.raises(PolicyError):
            list(llm.stream([[5] * 4, [5] * 3], asked))
        assert llm.engine.scheduler.is_idle and not llm.engine.has_work
        with pytest.raises(InvalidRequest, match=r"prompts\[1\].*sampling_params"):
            llm.generate([[5] * 4, [6] * 4], [asked, None])  # type: ignore[list-item]
        assert llm.engine.scheduler.is_idle and not llm.engine.has_work


def failing(policy: Callable[..., Any], calls: range) -> Callable[..., Any]:
    """The policy, with some calls that raise."""
    count = iter(range(1 << 30))

    def call(*arguments: Any) -> Any:
        if next(count) in calls:
            raise Broken("in a step")
        return policy(*arguments)

    call.__signature__ = signature(policy)  # type: ignore[attr-defined]
    return call


TIGHT = {"num_blocks": 9, "num_host_blocks": 6, "swap": "swap", "headroom": "watermark(0.0)"}


@each_scheduling
@pytest.mark.parametrize("slot", ["batching", "chunk", "headroom", "victim", "swap"])
def test_a_policy_error_within_a_step_ends_requests_and_not_the_engine(
    slot: str, async_scheduling: int
) -> None:
    ready_made = getattr(preset("vllm_v1", **{**SMALL, **TIGHT}), slot)
    num_failed = 0
    # A chunk rule is also called once for each added request.
    for first in range(6, 18) if slot == "chunk" else range(12):
        policy = failing(ready_made, range(first, first + MAX_FAULTS - 1))
        engine = make(async_scheduling, **{**TIGHT, slot: policy})
        requests = [engine.add(str(i), [i] * (4 + i), params(i))[0] for i in range(6)]
        faults = []
        while engine.has_work:
            engine.step()
            faults.append(engine.fault)
        assert not engine.has_given_up
        num_failed += any(fault and "in a step" in fault for fault in faults)
        for request in requests:
            tokens, reason = oracle(request.prompt, request.params, 1 << 20)
            assert list(request.output) == tokens[: request.num_generated]
            assert request.finish_reason in (reason, "error")
        check_idle(engine)
    assert num_failed >= 3


@each_scheduling
@pytest.mark.parametrize("wrong", [Broken("for it"), object()], ids=["raises", "returns"])
@pytest.mark.parametrize("slot", ["queue", "headroom", "victim", "swap"])
def test_a_policy_error_for_one_request_within_a_step_ends_that_request_alone(
    slot: str, wrong: object, async_scheduling: int
) -> None:
    """Also if it is one of those in flight, and if the plan is partly built."""
    ready_made = getattr(preset("vllm_v1", **{**SMALL, **TIGHT}), slot)
    ready_made = ready_made.key if slot == "queue" else ready_made
    added = set[str]()

    def rule(request: Request, view: Any) -> Any:
        if request.id == "3" and "3" in added:
            if isinstance(wrong, Broken) or slot == "swap":  # a swap rule may return anything
                raise Broken("for it")
            return wrong
        return ready_made(request, view)

    engine = make(async_scheduling, **{**TIGHT, slot: rule})
    engine.observers.append(events := Events())
    requests = [engine.add(str(i), [i] * (4 + i), params(i))[0] for i in range(6)]
    added.add("3")
    while engine.has_work:
        engine.step()
    assert not engine.has_given_up and sorted(r.id for r in events.ended) == list("012345")
    failed = requests.pop(3)
    assert failed.finish_reason == "error"
    assert f"{slot} policy" in str(failed.error) and "request '3'" in str(failed.error)
    for request in requests:
        expected = oracle(request.prompt, request.params, 1 << 20)
        assert (list(request.output), request.finish_reason) == expected
    check_idle(engine)


NONSENSE = (None, nan, inf, -inf, 2.5, "x", (), [], {}, object(), 10**400, -5, b"", 1j, print)


@given(
    slot=st.sampled_from(["chunk", "headroom", "victim", "swap", "queue"]),
    value=st.sampled_from(NONSENSE),
    late=st.integers(0, 12),
    async_scheduling=st.integers(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_a_wrong_return_value_of_a_policy_ends_requests_and_not_the_engine(
    slot: str, value: Any, late: int, async_scheduling: int
) -> None:
    calls = iter(range(1 << 30))
    ready_made = getattr(preset("vllm_v1", **{**SMALL, **TIGHT}), slot)
    ready_made = ready_made.key if slot == "queue" else ready_made

    def two(request: Any, view: Any) -> Any:
        return value if next(calls) >= late else ready_made(request, view)

    def three(want: int, left: int, is_first: bool) -> Any:
        return value if next(calls) >= late else ready_made(want, left, is_first)

    engine = make(async_scheduling, **{**TIGHT, slot: three if slot == "chunk" else two})
    for number in range(6):
        try:
            engine.add(str(number), [number] * (4 + number), params(number))
        except PolicyError as error:
            assert error.slot == slot
        except RequestTooLong:
            assert slot == "chunk"  # it grants nothing
    engine.run()
    check_idle(engine)


@pytest.mark.parametrize("amount", [2.0, 2.5, inf, np.int64(2)])
def test_a_chunk_policy_may_return_any_type_of_number(amount: Any) -> None:
    engine = make(chunk=lambda want, left, is_first: amount)
    (request,) = engine.add("a", [1] * 7, params())
    engine.run()
    assert (list(request.output), request.finish_reason) == oracle(
        request.prompt, params(), 1 << 20
    )
    check_no_leaks(engine.scheduler)


def check_idle(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert scheduler.is_idle and not engine.has_work and not scheduler.state.stop_tokens
    assert not scheduler.state.prefilling and not scheduler.state.decode_batch.members


HUGE = (10**30, -(10**30), 10**400, -(10**400), 10**5000, 1 << 63, 1e300, 1e400, -1e400)
JUNK: tuple[Any, ...] = (
    *HUGE, nan, -inf, 1.5, True, False, None, "", "x", "\ud800", "\0", b"", b"abcd", b"abc",
    bytearray(8), (), (1,), [1.5], [None], [[1]], [1 << 31], [10**400], {}, {1: 2}, {1}, object(),
    object, range(3), range(10**12), range(10**30), np.int64(3), np.float64(nan), np.zeros(3),
    np.array([1, 2]), np.ones((2, 2)), iter("ab"), 1j, RequestParams(), lambda: 1, Ellipsis,
)  # fmt: skip
junk = st.one_of(
    st.sampled_from(JUNK), st.integers(), st.floats(), st.text(), st.binary(),
    st.recursive(st.integers() | st.floats() | st.text(), st.lists, max_leaves=5),
)  # fmt: skip
REQUEST_FIELDS = ("id", "prompt", "arrival", "params", *(f.name for f in fields(RequestParams)))


def check_request(field: str, value: Any) -> None:
    """A request with this value in one field runs, or is refused with a HeadwayError."""
    engine = make(queue="priority(preempts=True)")
    asked: dict[str, Any] = {"id": "a", "prompt": [1, 2], "params": params(n=2), "arrival": 0.0}
    if field in asked:
        asked[field] = value
    elif field != "sampling":  # only the executor reads it
        asked["params"] = params(**{"max_tokens": 4, field: value})
    try:
        engine.add(**asked)
    except HeadwayError as error:
        assert len(str(error)) < 400
        check_idle(engine)
    engine.add("b", [3, 4], params())
    engine.run()
    check_idle(engine)


@pytest.mark.parametrize("field", REQUEST_FIELDS)
def test_a_request_with_junk_in_any_field_runs_or_is_refused(field: str) -> None:
    for value in JUNK:
        check_request(field, value)


@given(field=st.sampled_from(REQUEST_FIELDS), value=junk)
@settings(max_examples=150, deadline=None)
def test_a_request_with_random_junk_runs_or_is_refused(field: str, value: Any) -> None:
    check_request(field, value)


REFUSED: list[tuple[str, Any, str]] = [
    ("deadline", 10**400, f"{MAX_SECONDS:.0e}"), ("deadline", inf, f"{MAX_SECONDS:.0e}"),
    ("deadline", True, "True"), ("priority", 10**400, str(MAX_WHOLE)), ("priority", True, "True"),
    ("priority", nan, "nan"), ("max_tokens", 10**400, str(MAX_WHOLE)),
    ("max_tokens", 10**5000, "16610 bits"), ("min_tokens", 10**5000, str(MAX_WHOLE)),
    ("n", 10**30, str(MAX_SAMPLES)), ("n", 10**5000, "bits"), ("n", True, "True"),
    ("salt", 5, "5"), ("client", 5, "5"), ("client", None, "None"), ("reads_cache", "x", "'x'"),
    ("ignore_eos", np.ones(2), "array"), ("stop_ids", {1 << 31}, str(MAX_TOKEN_ID)),
    ("eos_ids", range(10**12), str(MAX_STOPS)), ("eos_ids", "ab", "'ab'"),
    ("stop_ids", [[1]], r"\[\[1\]\]"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "shown"), REFUSED, ids=shorten)
def test_the_error_names_field_and_value_or_limit_of_an_absurd_param(
    field: str, value: Any, shown: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be .*{shown.replace('+', '.')}"):
        make().add("a", [1, 2], RequestParams(**{field: value}))


@pytest.mark.parametrize("arrival", [10**400, nan, inf, "z", True, 1e16], ids=shorten)
def test_the_error_names_an_absurd_arrival(arrival: Any) -> None:
    with pytest.raises(InvalidRequest, match="arrival must be a number .*1e.15"):
        make().add("a", [1], params(), arrival)


PROMPTS: list[tuple[Any, str]] = [
    ("text", "'text'"), (b"abcd", "b'abcd'"), (bytearray(4), "bytearray"), ([1, 2.5], "2.5"),
    ([1, 1 << 31], f"{MAX_TOKEN_ID}, not {1 << 31}"), ([10**400], "1329 bits"), (5, "not 5"),
    (None, "None"), ([[1]], r"\[1\]"), (iter([1, "x"]), "'x'"), ({1: 2}, r"\{1: 2\}"),
    (range(MAX_PROMPT + 1), str(MAX_PROMPT)), (range(10**30), "range"), (np.ones(3), "1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "shown"), PROMPTS, ids=[shown for _, shown in PROMPTS])
def test_the_error_names_the_wrong_part_of_a_prompt(prompt: Any, shown: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt .*{shown}"):
        make().add("a", prompt, params())


@pytest.mark.parametrize("prompt", [range(3), (1, 2), np.array([1, 2]), iter([1, 2])])
def test_any_iterable_of_integers_is_a_prompt(prompt: Any) -> None:
    engine = make()
    engine.add("a", prompt, params())
    engine.run()
    check_no_leaks(engine.scheduler)


def check_number(number: str, value: Any) -> None:
    try:
        config = preset("minivllm", **{number: value})
    except ConfigError as error:
        assert number in str(error) and len(str(error)) < 400
    else:
        Scheduler(config)


@pytest.mark.parametrize("number", NUMBERS)
def test_junk_for_any_number_of_a_config_is_accepted_or_a_config_error(number: str) -> None:
    for value in JUNK:
        check_number(number, value)


@given(number=st.sampled_from(NUMBERS), value=junk)
@settings(max_examples=100, deadline=None)
def test_random_junk_for_a_number_of_a_config_is_accepted_or_a_config_error(
    number: str, value: Any
) -> None:
    # else tables of 2**26 entries are allocated
    if not isinstance(value, int) or value > 1 << 40 or value < 1 << 20:
        check_number(number, value)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_of_a_config_has_a_limit_that_its_error_names(number: str) -> None:
    for value in (10**12, 10**400, 10**5000):
        with pytest.raises(ConfigError, match=rf"{number} must be .* at most \d+, not .*"):
            preset(**{number: value})


def test_the_largest_block_size_works() -> None:
    largest = 1 << 16
    engine = make(block_size=largest, num_blocks=4)
    engine.add("a", [1] * 5, params())
    engine.run()
    with pytest.raises(ConfigError, match=f"block_size .* {largest}, not {largest + 1}"):
        preset(block_size=largest + 1)


@pytest.mark.parametrize("value", [inf, 10**400, nan], ids=shorten)
@pytest.mark.parametrize(
    "make_policy", [queues.earliest_deadline, queues.priority, queues.shortest_first], ids=str
)
def test_the_numbers_of_policies_must_be_finite(make_policy: Any, value: Any) -> None:
    with pytest.raises(ConfigError):
        make_policy(value)


def test_any_value_is_shortened_for_error_messages() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise Broken

    for value in (*JUNK, Silent(), "x" * 10**6):
        assert 0 < len(shorten(value)) < 80


def test_params_of_another_class_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="params .*SamplingParams"):
        make().add("a", [1], SamplingParams())  # type: ignore[arg-type]
