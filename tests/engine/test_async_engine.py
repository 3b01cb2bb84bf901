"""AsyncEngine and EngineLoop: every request gets its updates in order and exactly one end."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
from collections import UserList
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import MAX_FAULTS, Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import EngineStopped, FinishInfo, FromLoop, SampleUpdate, Submit
from headway.engine.queries import ExplainQueue
from headway.engine.queue_limits import QueueLimits
from headway.engine.thread_client import EventLoopBridge, ThreadClient
from headway.errors import ExecutorError, InvalidRequest, Overloaded, RequestTooLong
from headway.events import Completed, Event
from headway.request import RequestParams
from tests.support.drive import check_no_leaks
from tests.support.events import Events
from tests.support.faults import Faults
from tests.support.scripted import END, Breaking, Double, GetPid, Stepped, make_engine, script
from tests.support.waiting import LIMIT, on_loop, until, wait_until

each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
PROMPT = [1, 2, 3]
SLOW = 0.002  # seconds of a step in tests that act between steps
SLOWER = 0.05  # seconds of a step: a request of 900 tokens does not end before the test acts


def within(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine; TimeoutError if it does not end."""
    return asyncio.run(asyncio.wait_for(work, LIMIT))


@asynccontextmanager
async def running(engine: Engine, limits: QueueLimits | None = None) -> AsyncIterator[AsyncEngine]:
    """A started engine; checks at the end that no request has left anything behind."""
    running = AsyncEngine(engine, limits)
    await running.start()
    try:
        yield running
        # Cancelled requests still have to end.
        await until(lambda: running.stop_reason or not (engine.has_work or running._abandoned))
    finally:
        await running.close()
    assert running.num_open == 0 and not running._abandoned and not running._pending_queries
    if isinstance(running.client, ThreadClient):
        assert not running.client.loop._updates.times
    check_no_leaks(engine.scheduler)


async def read(
    engine: AsyncEngine, id: str, prompt: list[int], params: RequestParams
) -> list[SampleUpdate]:
    """All updates of a request."""
    return [u async for updates in engine.stream(id, prompt, params) for u in updates]


def samples_of(updates: list[SampleUpdate], n: int = 1) -> list[tuple[list[int], FinishInfo]]:
    """The tokens of each sample and its end, which must come last and once."""
    samples: list[tuple[list[int], FinishInfo]] = []
    for sample in range(n):
        own = [update for update in updates if update.sample == sample]
        assert [u.end is not None for u in own] == [False] * (len(own) - 1) + [True]
        tokens = [token for update in own for token in update.tokens]
        assert own[-1].end is not None
        samples.append((tokens, own[-1].end))
    return samples


@each_scheduling
@on_loop
async def test_a_stream_yields_all_tokens_in_order_and_one_end(async_scheduling: int) -> None:
    async with running(make_engine(async_scheduling=async_scheduling)) as engine:
        [(tokens, end)] = samples_of(await read(engine, "a", PROMPT, script(6, filler=4)))
        assert tokens == [4] * 5 + [END] and end.reason == "stop" and end.stop_token == END
        assert 0 <= end.queue <= end.first_token <= end.total


@each_scheduling
@on_loop
async def test_every_one_of_n_samples_has_its_own_end(async_scheduling: int) -> None:
    async with running(make_engine(async_scheduling=async_scheduling)) as engine:
        updates = await read(engine, "a", PROMPT, script(5, n=3))
        assert [tokens for tokens, _ in samples_of(updates, 3)] == [[1, 1, 1, 1, END]] * 3


@on_loop
async def test_one_sample_can_be_stopped_while_the_others_continue() -> None:
    stepped = Stepped(inner := make_engine())
    stepped.allow(10)
    async with running(inner) as engine:
        updates: list[SampleUpdate] = []
        async for gained in engine.stream("a", PROMPT, script(200, n=3)):
            updates += gained
            if len(updates) >= 6:
                engine.stop_sample("a", 1)
                stepped.free()
        first, second, third = samples_of(updates, 3)
        assert len(first[0]) == len(third[0]) == 200 > len(second[0])
        assert second[1].reason == "stop" and second[1].stop_token is None


@on_loop
async def test_a_prompt_that_raises_while_it_is_read_fails_alone() -> None:
    class FailedRow(UserList[int]):
        def __iter__(self) -> Iterator[int]:
            raise RuntimeError("the row of a dataset cannot be read")

    async with running(inner := make_engine(SLOW)) as engine:
        other = asyncio.create_task(read(engine, "other", PROMPT, script(20)))
        await until(lambda: inner.scheduler.num_steps)
        with pytest.raises(RuntimeError, match="row of a dataset"):
            await anext(aiter(engine.stream("a", FailedRow(PROMPT), script(3))))
        assert len(samples_of(await other)[0][0]) == 20
        await read(engine, "a", PROMPT, script(3))  # the id is free


@pytest.mark.parametrize("leave", ["break", "cancel", "raise"])
@each_scheduling
@on_loop
async def test_leaving_a_stream_frees_its_blocks_within_a_step(
    async_scheduling: int, leave: str
) -> None:
    async def first_of(engine: AsyncEngine, begun: asyncio.Event) -> None:
        async for _ in engine.stream("long", PROMPT, script(900, n=2)):
            begun.set()
            if leave == "break":
                return
            if leave == "raise":
                raise KeyError
            await asyncio.Event().wait()  # which is never set

    inner = make_engine(SLOWER, async_scheduling, num_blocks=2_000)
    events = Events()
    async with running(inner) as engine:
        task = asyncio.create_task(first_of(engine, begun := asyncio.Event()))
        await begun.wait()
        task.cancel()
        with suppress(KeyError, asyncio.CancelledError):
            await task
        # asyncio closes a stream that was left by `break` in a later round of its loop.
        await until(lambda: engine._abandoned or not inner.scheduler.requests)
        inner.observers.append(events)
        await until(lambda: not inner.scheduler.requests)
    assert len(events.completed) <= 2 + async_scheduling


@on_loop
async def test_an_id_can_be_reused_only_after_its_request_has_ended() -> None:
    async with running(make_engine(SLOWER)) as engine:
        left = engine.stream("a", PROMPT, script(900))
        await anext(left)
        with pytest.raises(InvalidRequest, match="choose another id"):
            await read(engine, "a", PROMPT, script(2))
        await left.aclose()  # type: ignore[attr-defined]
        with pytest.raises(InvalidRequest, match="choose another id"):
            await read(engine, "a", PROMPT, script(2))
        await until(lambda: not engine._abandoned)
        [(tokens, end)] = samples_of(await read(engine, "a", PROMPT, script(2)))
        assert tokens == [1, END] and end.reason == "stop"


@on_loop
async def test_the_error_of_a_refused_request_is_that_of_the_engine() -> None:
    async with running(make_engine()) as engine:
        with pytest.raises(RequestTooLong) as caught:
            await read(engine, "long", PROMPT, script(4, max_tokens=5000))
        assert caught.value.need > caught.value.limit > 0
        for prompt, params in (([], script(4)), (PROMPT, script(4, n=0)), ([-1 << 40], script(4))):
            with pytest.raises(InvalidRequest):
                await read(engine, "wrong", prompt, params)
        assert samples_of(await read(engine, "fine", PROMPT, script(1)))[0][0] == [END]


@pytest.mark.parametrize(
    "limits",
    [
        QueueLimits(max_waiting=3),
        QueueLimits(max_waiting_tokens=4 * len(PROMPT)),
        QueueLimits(max_per_client=3),
    ],
)
@on_loop
async def test_requests_above_a_limit_are_refused_and_the_others_continue(
    limits: QueueLimits,
) -> None:
    stepped = Stepped(inner := make_engine(max_num_seqs=2))
    async with running(inner, limits) as engine:
        asked = [read(engine, f"{i}", PROMPT, script(5, client="one")) for i in range(30)]
        reading = asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: engine.num_open == 30)
        stepped.free()
        answers = await reading
        refused = [a for a in answers if isinstance(a, Overloaded)]
        assert 0 < len(refused) < 30 and all(error.retry_after > 0 for error in refused)
        for answer in answers:
            if isinstance(answer, list):
                assert samples_of(answer)[0][0] == [1] * 4 + [END]
        assert samples_of(await read(engine, "later", PROMPT, script(1)))[0][0] == [END]


@on_loop
async def test_a_busy_engine_answers_queries_between_steps() -> None:
    stepped = Stepped(inner := make_engine())

    async def steps() -> None:
        """Let the engine make some steps, and hold it again."""
        await until(lambda: stepped.is_holding)
        stepped.allow(10)

    async with running(inner) as engine:
        assert isinstance(engine.client, ThreadClient)
        engine.client.loop.handle(Double, lambda query: 2 * query.value)
        reading = asyncio.create_task(read(engine, "a", PROMPT, script(100)))
        *doubles, _ = await asyncio.gather(*(engine.ask(Double(i)) for i in range(5)), steps())
        assert doubles == [0, 2, 4, 6, 8]
        await until(lambda: stepped.is_holding)  # the scheduler has released its lock
        assert re.search(r"\b1 of 8\b", await engine.ask(ExplainQueue()))
        with pytest.raises(ExecutorError, match=r"GetPid.*Double.*ExplainQueue.*ResetPrefixCache"):
            await asyncio.gather(engine.ask(GetPid()), steps())
        with pytest.raises(ExecutorError):
            await asyncio.gather(engine.ask(Double({})), steps())  # type: ignore[arg-type]
        assert not reading.done()
        stepped.free()
        assert len(samples_of(await reading)[0][0]) == 100


@each_scheduling
@on_loop
async def test_a_failed_step_ends_its_requests_and_later_ones_run(async_scheduling: int) -> None:
    inner = make_engine(async_scheduling=async_scheduling)
    Breaking(inner, lambda plan: len(plan.decodes) == 3)
    stepped = Stepped(inner)
    async with running(inner) as engine:
        reading = asyncio.gather(*(read(engine, f"{i}", PROMPT, script(50)) for i in range(3)))
        await until(lambda: engine.num_open == 3)
        stepped.free()
        for updates in await reading:
            [(_, end)] = samples_of(updates)
            assert end.reason == "error" and "the device was lost" in (end.error or "")
        assert samples_of(await read(engine, "later", PROMPT, script(3)))[0][0] == [1, 1, END]


@on_loop
async def test_an_engine_that_always_fails_refuses_requests_with_the_reason() -> None:
    inner = make_engine()
    Breaking(inner, lambda plan: True)
    async with Unchecked(inner) as engine:
        for i in range(MAX_FAULTS):
            [(_, end)] = samples_of(await read(engine, f"{i}", PROMPT, script(3)))
            assert end.reason == "error"
        with pytest.raises(ExecutorError, match="the device was lost"):
            await read(engine, "later", PROMPT, script(3))


class Unchecked:
    """A started engine that is closed in any state, without checks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = AsyncEngine(engine)

    async def __aenter__(self) -> AsyncEngine:
        await self.engine.start()
        return self.engine

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()


@on_loop
async def test_when_the_loop_raises_all_open_requests_fail_with_the_reason() -> None:
    def broken() -> None:
        raise RuntimeError("step is broken")

    inner = make_engine(SLOWER, num_blocks=2_000)
    async with Unchecked(inner) as engine:
        asked = [asyncio.create_task(read(engine, f"{i}", PROMPT, script(900))) for i in range(20)]
        await until(lambda: len(inner.scheduler.requests) == 20)
        inner.step = broken  # type: ignore[method-assign]
        question = asyncio.create_task(engine.ask(ExplainQueue()))
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, ExecutorError) and "step is broken" in str(answer)
        with suppress(ExecutorError):
            await question  # answered or failed, but not left waiting
        assert engine.stop_reason is not None and engine.num_open == 0
        for later in (read(engine, "later", PROMPT, script(1)), engine.ask(ExplainQueue())):
            with pytest.raises(ExecutorError, match="has stopped.*restart"):
                await later


@on_loop
async def test_closing_an_engine_ends_open_requests() -> None:
    async with Unchecked(inner := make_engine(SLOWER)) as engine:
        reading = asyncio.create_task(read(engine, "a", PROMPT, script(900)))
        await until(lambda: inner.scheduler.requests)
    with pytest.raises(ExecutorError, match=r"stop\(\) was called"):
        await reading


@on_loop
async def test_an_engine_that_was_not_started_can_be_closed() -> None:
    await AsyncEngine(make_engine()).close()


@on_loop
async def test_cancel_all_ends_every_stream_and_refuses_new_requests() -> None:
    async with running(inner := make_engine(SLOWER, max_num_seqs=2)) as engine:
        asked = [
            asyncio.create_task(read(engine, f"{i}", PROMPT, script(900, n=2))) for i in range(5)
        ]
        await until(lambda: len(inner.scheduler.requests) == 10)
        engine.cancel_all()
        for updates in await asyncio.gather(*asked):
            assert {end.reason for _, end in samples_of(updates, 2)} == {"abort"}
        with pytest.raises(Overloaded, match="shutting down"):
            await read(engine, "later", PROMPT, script(1))


def test_an_observer_that_raises_is_removed_and_requests_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = Events()

    def full_disk(event: Event) -> None:
        if isinstance(event, Completed) and event.plan.step >= 3:
            raise OSError(28, "No space left on device")

    async def ask() -> None:
        inner = make_engine()
        inner.observers.append(full_disk)
        async with running(inner) as engine:
            inner.observers.append(events)
            for id in "ab":
                assert len(samples_of(await read(engine, id, PROMPT, script(10)))[0][0]) == 10
            assert full_disk not in inner.observers

    with caplog.at_level(logging.WARNING):
        within(ask())
    steps = [completed.plan.step for completed in events.completed]
    assert steps == list(range(20)) and len(caplog.records) == 1
    assert "full_disk" in caplog.text and "No space left" in caplog.text


def test_an_engine_outlives_its_loops_without_a_trace_of_them() -> None:
    inner = make_engine()

    async def ask() -> None:
        async with running(inner) as engine:
            assert len(samples_of(await read(engine, "a", PROMPT, script(5)))[0][0]) == 5

    for _ in range(2):
        within(ask())
        assert inner.observers == [] and inner.on_observer_error is None


def test_messages_for_a_closed_event_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    bridge = EventLoopBridge(loop, lambda messages: None)
    loop.close()
    bridge.deliver([EngineStopped("the test has ended")])
    assert not bridge._messages


def test_without_a_loop_the_exception_of_an_observer_is_raised() -> None:
    def fail(event: Event) -> None:
        raise KeyError("observer")

    engine = make_engine()
    engine.observers.append(fail)
    engine.add("a", PROMPT, script(3))
    with pytest.raises(KeyError):
        engine.run()


def test_requests_from_many_threads_all_end() -> None:
    answered: list[FromLoop] = []
    loop = EngineLoop(make_engine(), answered.extend)
    running = threading.Thread(target=loop.run)
    running.start()

    def post(name: str) -> None:
        for number in range(25):
            loop.post([Submit(f"{name}{number}", PROMPT, script(3))])

    posting = [threading.Thread(target=post, args=(name,)) for name in "abcd"]
    for thread in posting:
        thread.start()
    for thread in posting:
        thread.join()
    wait_until(
        lambda: sum(isinstance(u, SampleUpdate) and u.end is not None for u in answered) == 100
    )
    loop.stop()
    running.join(LIMIT)
    assert type(answered[-1]).__name__ == "EngineStopped" and loop.ended == "stop() was called"


def test_a_loop_that_fails_says_why_and_ends_no_request() -> None:
    """Also if a step fails for the same reason: a fleet continues the requests elsewhere."""
    delivered: list[FromLoop] = []
    loop = EngineLoop(make_engine(), delivered.extend)
    faults = Faults(loop.engine)
    faults.calls[2], faults.fails_at = partial(loop.fail, "a rank was killed"), {2}
    loop.post([Submit(id, PROMPT, script(9)) for id in "abc"])
    loop.run()
    assert delivered.pop() == EngineStopped("a rank was killed") == EngineStopped(loop.ended or "")
    assert delivered and not [e for e in delivered if isinstance(e, SampleUpdate) and e.end]


def test_an_idle_loop_ends_when_it_fails() -> None:
    delivered: list[FromLoop] = []
    loop = EngineLoop(make_engine(), delivered.extend)
    running = threading.Thread(target=loop.run)
    running.start()
    loop.fail("a rank was killed")
    running.join(LIMIT)
    assert delivered == [EngineStopped("a rank was killed")]


def test_updates_are_delivered_before_other_observers_see_a_step() -> None:
    """Also before those that were there first, such as the writer of a trace."""
    order: list[str] = []
    engine = make_engine()
    engine.observers.append(lambda event: order.append(type(event).__name__))
    loop = EngineLoop(engine, lambda messages: order.append("updates"))
    loop.post([Submit("a", PROMPT, script(3))])
    while not order or engine.has_work:
        loop._read()
        engine.step()
    completed = [place for place, each in enumerate(order) if each == "Completed"]
    assert len(completed) > 2 and all(order[place - 1] == "updates" for place in completed)


# Random requests that start and are left at random times.


async def read_randomly(engine: AsyncEngine, rng: random.Random, id: str) -> str:
    """One client: submits a request and reads some or all of it; returns the outcome."""
    n, num_output, filler = rng.choice((1, 1, 2, 4)), rng.randrange(1, 30), rng.randrange(1, 8)
    params = script(
        num_output, filler, n=n, client=rng.choice("ab"), priority=rng.randrange(3),
        max_tokens=rng.choice((num_output + 1, 5, 30, 4000)),
    )  # fmt: skip
    prompt = [rng.randrange(3) for _ in range(rng.choice((0, 1, 5, 40, 40)))]
    max_updates = rng.choice((None, None, 0, 1, 3))
    await asyncio.sleep(rng.random() * 0.02)
    updates: list[SampleUpdate] = []
    try:
        stream = engine.stream(id, prompt, params)
        async for gained in stream:
            updates += gained
            if max_updates is not None and len(updates) > max_updates:
                return "left"
            if rng.random() < 0.05:
                engine.stop_sample(id, rng.randrange(n))
    except (InvalidRequest, RequestTooLong, Overloaded) as error:
        assert not updates
        return type(error).__name__
    assert params.max_tokens is not None
    expected = [filler] * (num_output - 1) + [END]
    if params.max_tokens <= num_output:  # max_tokens ends it before the script does
        expected = [filler] * params.max_tokens
    for tokens, end in samples_of(updates, n):
        assert tokens == expected[: len(tokens)] and end.reason in ("stop", "length")
        is_cut = end.reason == "stop" and end.stop_token is None
        assert is_cut or len(tokens) == len(expected), (tokens, expected, end)
    return "read"


async def ask_randomly(engine: AsyncEngine, rng: random.Random, id: str) -> str:
    """One client, which asks again if the queue is full."""
    while (outcome := await read_randomly(engine, rng, id)) == Overloaded.__name__:
        pass
    return outcome


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_each_end_once(seed: int) -> None:
    rng = random.Random(seed)

    async def live() -> list[str]:
        inner = make_engine(
            rng.choice((0.0, 0.0005)), async_scheduling=seed % 2, max_num_seqs=rng.randrange(2, 9),
            num_blocks=rng.choice((24, 60)), queue=rng.choice(("fcfs", "fair", "priority")),
            num_scheduler_steps=rng.choice((1, 3)),
        )  # fmt: skip
        limits = rng.choice(
            (QueueLimits(), QueueLimits(max_waiting=8), QueueLimits(max_per_client=5))
        )
        async with running(inner, limits) as engine:
            rngs = [random.Random(rng.random()) for _ in range(60)]
            clients = [ask_randomly(engine, own, f"{i}") for i, own in enumerate(rngs)]
            return list(await asyncio.gather(*clients))

    outcomes = within(live())
    assert len(outcomes) == 60 and {"read", "left"} <= set(outcomes)
