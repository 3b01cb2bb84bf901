"""Slow preparation of a request delays no other request, and messages keep their order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.messages import Cancel, Refusal, Submit, ToLoop
from headway.engine.queries import GetTime
from headway.engine.thread_client import PreparationQueue
from headway.errors import ExecutorError, InvalidGrammar, Overloaded
from headway.request import RequestParams
from tests.engine.test_async_engine import read, running, samples_of
from tests.support.scripted import make_engine, script
from tests.support.waiting import LIMIT, on_loop, until

READY, SLOW = RequestParams(salt="ready"), RequestParams(salt="slow")


class GatedPreparation:
    """Prepares params with the salt "slow" once the gate is open, and changes their salt."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.num_started = 0
        self._fault = fault

    def ready(self, params: RequestParams) -> RequestParams | None:
        return None if params.salt == "slow" else params

    def make_ready(self, params: RequestParams) -> RequestParams:
        self.num_started += 1
        assert self.gate.wait(LIMIT)
        if self._fault is not None:
            raise self._fault
        return replace(params, salt="prepared")


def passed(
    through: Callable[[PreparationQueue], None],
    preparation: GatedPreparation,
    refused: list[Refusal] | None = None,
) -> list[ToLoop]:
    """All messages that reach the loop; refusals go to `refused`."""
    seen: list[ToLoop] = []
    queue = PreparationQueue(
        seen.extend, preparation, [].append if refused is None else refused.append
    )
    through(queue)
    preparation.gate.set()
    queue._thread.shutdown()  # waits for running preparations
    assert not queue._held
    return seen


messages = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.sampled_from(["ready", "slow", "cancel", "stop"])),
        st.just((0, "ask")),
    ),
    max_size=12,
)


@given(messages, st.integers(0, 12))
def test_no_message_is_lost_and_none_overtakes_its_request(
    wanted: list[tuple[int, str]], gate: int
) -> None:
    made = {"cancel": Cancel, "stop": partial(Cancel, sample=0)}
    sent: list[ToLoop] = []
    known = set[int]()
    for place, (number, kind) in enumerate(wanted):
        if kind == "ask":
            sent.append(GetTime(number=place))
        elif kind in made:
            sent.append(made[kind](str(number)))
        elif number not in known:  # each id is used once
            known.add(number)
            sent.append(Submit(str(number), [], READY if kind == "ready" else SLOW))
    preparation = GatedPreparation()

    def send(queue: PreparationQueue) -> None:
        for place, message in enumerate(sent):
            if place == gate:
                preparation.gate.set()
            queue.send([message])

    came = passed(send, preparation)
    plain = [m.id if isinstance(m, Submit | Cancel) else m.number for m in came]
    assert sorted(map(str, plain)) == sorted(
        str(m.id if isinstance(m, Submit | Cancel) else m.number) for m in sent
    )
    for id in {m.id for m in sent if isinstance(m, Submit | Cancel)}:
        own = [type(m) for m in came if isinstance(m, Submit | Cancel) and m.id == id]
        assert own == [type(m) for m in sent if isinstance(m, Submit | Cancel) and m.id == id]
    salts = {m.params.salt for m in came if isinstance(m, Submit)}
    assert salts <= {"ready", "prepared"}


def test_ready_requests_pass_while_another_is_prepared() -> None:
    preparation, seen = GatedPreparation(), list[ToLoop]()
    queue = PreparationQueue(seen.extend, preparation, [].append)
    ready = Submit("b", [], READY)
    queue.send([Submit("a", [], SLOW), ready, GetTime(), Cancel("a"), Cancel("b")])
    assert seen == [ready, GetTime(), Cancel("b")]
    preparation.gate.set()
    queue._thread.shutdown()
    assert seen[3:] == [Submit("a", [], RequestParams(salt="prepared")), Cancel("a")]


def test_a_request_whose_preparation_fails_is_passed_on_unchanged() -> None:
    asked = Submit("a", [1], SLOW)
    preparation = GatedPreparation(ValueError("no tokenizer"))
    assert passed(lambda queue: queue.send([asked]), preparation) == [asked]


@pytest.mark.parametrize(
    ("error", "kind", "fields"),
    [
        (InvalidGrammar("regex cannot be used: too large"), "InvalidGrammar", {}),
        (Overloaded("no process", retry_after=2.0), "Overloaded", {"retry_after": 2.0}),
    ],
)
def test_a_request_with_invalid_params_is_refused_and_never_reaches_the_loop(
    error: Exception, kind: str, fields: dict[str, Any]
) -> None:
    refused: list[Refusal] = []
    other = Submit("b", [1], READY)
    sent: list[ToLoop] = [Submit("a", [1], SLOW), Cancel("a"), other]
    assert passed(lambda queue: queue.send(sent), GatedPreparation(error), refused) == [other]
    assert refused == [Refusal("a", kind, str(error), fields)]


@pytest.mark.parametrize("is_left", [False, True])
@on_loop
async def test_a_refusal_by_the_preparation_queue_reaches_the_stream_and_frees_the_id(
    is_left: bool,
) -> None:
    engine = make_engine()
    preparation = engine.preparation = GatedPreparation(
        InvalidGrammar("regex cannot be used: too large")
    )
    async with running(engine) as here:
        slow = replace(script(5), salt="slow")
        waiting = asyncio.create_task(read(here, "r", [1, 2, 3], slow))
        await until(lambda: preparation.num_started)
        if is_left:
            waiting.cancel()
            await asyncio.wait([waiting])
        preparation.gate.set()
        if not is_left:
            with pytest.raises(InvalidGrammar, match="too large"):
                await waiting
        await until(lambda: not here._abandoned)
        again = await read(here, "r", [1, 2, 3], script(5))
        assert samples_of(again)[0][1].reason == "stop"


@pytest.mark.parametrize("is_cancelled", [False, True])
@on_loop
async def test_other_requests_run_while_one_is_prepared(is_cancelled: bool) -> None:
    engine = make_engine()
    preparation = engine.preparation = GatedPreparation()
    async with running(engine) as here:
        slow = replace(script(5), salt="slow")
        waiting = asyncio.create_task(read(here, "slow", [1, 2, 3], slow))
        await until(lambda: preparation.num_started)
        others = await asyncio.gather(
            *(read(here, f"quick {n}", [1, 2, 3], script(5)) for n in range(20))
        )
        assert all(samples_of(each)[0][1].reason == "stop" for each in others)
        assert not waiting.done()
        if is_cancelled:
            waiting.cancel()
            await asyncio.wait([waiting])
            assert here._abandoned == {"slow": 1}  # its end has not arrived yet
            preparation.gate.set()
            await until(lambda: not here._abandoned)
        else:
            preparation.gate.set()
            assert samples_of(await waiting)[0][0] == samples_of(others[0])[0][0]


@on_loop
async def test_closing_an_engine_does_not_wait_for_preparations() -> None:
    engine = make_engine()
    preparation = engine.preparation = GatedPreparation()
    async with running(engine) as here:
        slow = [replace(script(5), salt="slow")] * 3
        waiting = [asyncio.create_task(read(here, str(n), [1], p)) for n, p in enumerate(slow)]
        await until(lambda: preparation.num_started)
        await here.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("has stopped" in str(each) for each in results)
        preparation.gate.set()


def test_a_request_that_needs_preparation_is_refused_after_close() -> None:
    refused, seen = list[Refusal](), list[ToLoop]()
    queue = PreparationQueue(seen.extend, GatedPreparation(), refused.append)
    queue.close()
    queue.send([Submit("a", [1], SLOW), Submit("b", [1], READY), Cancel("a")])
    assert [(each.id, each.kind) for each in refused] == [("a", "ExecutorError")]
    assert seen == [Submit("b", [1], READY), Cancel("a")] and not queue._held


@on_loop
async def test_a_request_that_needs_preparation_fails_while_the_engine_closes() -> None:
    engine = make_engine()
    engine.preparation = GatedPreparation()
    async with running(engine) as here:
        closing = asyncio.create_task(here.close())
        await asyncio.sleep(0)  # the queue is closed; the end of the loop is not yet known
        assert here.stop_reason is None
        with pytest.raises(ExecutorError):  # of the queue, or of the loop that has ended
            await read(here, "a", [1], replace(script(5), salt="slow"))
        assert not here._abandoned
        await closing
