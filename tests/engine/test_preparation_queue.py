"""Laws of the preparation_queue: what takes long to read holds up nobody else, and nothing overtakes it."""

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

from headway.engine.messages import Cancel, Query, Refusal, Submit, ToLoop
from headway.engine.preparation_queue import PreparationQueue
from headway.errors import InvalidGrammar, Overloaded
from headway.request import Params
from tests.engine.test_async_engine import read, running, sayings, within
from tests.support.scripted import make_engine, script

READY, SLOW = Params(salt="ready"), Params(salt="slow")


class Reading:
    """Params of the salt "slow" are made ready when the gate is open; then they say so."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.num_begun = 0
        self._fault = fault

    def ready(self, params: Params) -> Params | None:
        return None if params.salt == "slow" else params

    def make_ready(self, params: Params) -> Params:
        self.num_begun += 1
        assert self.gate.wait(10)
        if self._fault is not None:
            raise self._fault
        return replace(params, salt="made ready")


def passed(
    through: Callable[[PreparationQueue], None],
    reading: Reading,
    refused: list[Refusal] | None = None,
) -> list[ToLoop]:
    """All that comes to a loop in the end; refusals go to `refused`."""
    seen: list[ToLoop] = []
    preparation_queue = PreparationQueue(
        seen.extend, reading, [].append if refused is None else refused.append
    )
    through(preparation_queue)
    reading.gate.set()
    assert preparation_queue._thread is not None
    preparation_queue._thread.shutdown()  # waits for what is being read
    assert not preparation_queue._held
    return seen


messages = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.sampled_from(["ready", "slow", "cancel", "stop"])),
        st.just((0, "ask")),
    ),
    max_size=12,
)


@given(messages, st.integers(0, 12))
def test_nothing_is_lost_and_nothing_overtakes_its_request(
    wanted: list[tuple[int, str]], gate: int
) -> None:
    made = {"cancel": Cancel, "stop": partial(Cancel, sample=0)}
    sent: list[ToLoop] = []
    known = set[int]()
    for place, (number, kind) in enumerate(wanted):
        if kind == "ask":
            sent.append(Query(place, "why"))
        elif kind in made:
            sent.append(made[kind](str(number)))
        elif number not in known:  # an id is used once
            known.add(number)
            sent.append(Submit(str(number), [], READY if kind == "ready" else SLOW))
    reading = Reading()

    def send(preparation_queue: PreparationQueue) -> None:
        for place, message in enumerate(sent):
            if place == gate:
                reading.gate.set()
            preparation_queue.send([message])

    came = passed(send, reading)
    plain = [m.id if isinstance(m, Submit | Cancel) else m.number for m in came]
    assert sorted(map(str, plain)) == sorted(
        str(m.id if isinstance(m, Submit | Cancel) else m.number) for m in sent
    )
    for id in {m.id for m in sent if isinstance(m, Submit | Cancel)}:
        own = [type(m) for m in came if isinstance(m, Submit | Cancel) and m.id == id]
        assert own == [type(m) for m in sent if isinstance(m, Submit | Cancel) and m.id == id]
    salts = {m.params.salt for m in came if isinstance(m, Submit)}
    assert salts <= {"ready", "made ready"}


def test_what_is_ready_passes_at_once_beside_what_is_not() -> None:
    reading, seen = Reading(), list[ToLoop]()
    preparation_queue = PreparationQueue(seen.extend, reading, [].append)
    ready = Submit("b", [], READY)
    preparation_queue.send(
        [Submit("a", [], SLOW), ready, Query(0, "why"), Cancel("a"), Cancel("b")]
    )
    assert seen == [ready, Query(0, "why"), Cancel("b")]
    reading.gate.set()
    preparation_queue._thread.shutdown()  # type: ignore[union-attr]
    assert seen[3:] == [Submit("a", [], Params(salt="made ready")), Cancel("a")]


def test_what_cannot_be_made_ready_goes_on_as_it_is() -> None:
    asked = Submit("a", [1], SLOW)
    reading = Reading(ValueError("no tokenizer"))
    assert passed(lambda preparation_queue: preparation_queue.send([asked]), reading) == [asked]


@pytest.mark.parametrize(
    ("error", "kind", "numbers"),
    [
        (InvalidGrammar("regex cannot be used: too large"), "InvalidGrammar", {}),
        (Overloaded("no process", retry_after=2.0), "Overloaded", {"retry_after": 2.0}),
    ],
)
def test_a_request_whose_params_are_wrong_is_refused_and_never_comes_to_the_loop(
    error: Exception, kind: str, numbers: dict[str, Any]
) -> None:
    refused: list[Refusal] = []
    other = Submit("b", [1], READY)
    sent: list[ToLoop] = [Submit("a", [1], SLOW), Cancel("a"), other]
    assert passed(
        lambda preparation_queue: preparation_queue.send(sent), Reading(error), refused
    ) == [other]
    assert refused == [Refusal("a", kind, str(error), numbers)]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_refusal_of_the_anteroom_reaches_the_stream_and_frees_the_id(is_left: bool) -> None:
    engine = make_engine()
    reading = engine.preparation = Reading(InvalidGrammar("regex cannot be used: too large"))

    async def work() -> None:
        async with running(engine) as here:
            slow = replace(script(5), salt="slow")
            waiting = asyncio.create_task(read(here, "r", [1, 2, 3], slow))
            while not reading.num_begun:
                await asyncio.sleep(0.001)
            if is_left:
                waiting.cancel()
                await asyncio.wait([waiting])
            reading.gate.set()
            if not is_left:
                with pytest.raises(InvalidGrammar, match="too large"):
                    await waiting
            while here._left:
                await asyncio.sleep(0.001)
            again = await read(here, "r", [1, 2, 3], script(5))
            assert sayings(again)[0][1].reason == "stop"

    within(work())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_answers_go_on_while_a_request_is_made_ready(is_cancelled: bool) -> None:
    engine = make_engine()
    reading = engine.preparation = Reading()

    async def work() -> None:
        async with running(engine) as here:
            slow = replace(script(5), salt="slow")
            waiting = asyncio.create_task(read(here, "slow", [1, 2, 3], slow))
            while not reading.num_begun:
                await asyncio.sleep(0.001)
            others = await asyncio.gather(
                *(read(here, f"quick {n}", [1, 2, 3], script(5)) for n in range(20))
            )
            assert all(sayings(each)[0][1].reason == "stop" for each in others)
            assert not waiting.done()
            if is_cancelled:
                waiting.cancel()
                await asyncio.wait([waiting])
                assert here._left == {"slow": 1}  # to be told its end
                reading.gate.set()
                while here._left:
                    await asyncio.sleep(0.001)
            else:
                reading.gate.set()
                assert sayings(await waiting)[0][0] == sayings(others[0])[0][0]

    within(work())


def test_an_engine_that_ends_waits_for_nobody_who_is_being_read() -> None:
    engine = make_engine()
    reading = engine.preparation = Reading()

    async def work() -> None:
        async with running(engine) as here:
            slow = [replace(script(5), salt="slow")] * 3
            waiting = [asyncio.create_task(read(here, str(n), [1], p)) for n, p in enumerate(slow)]
            while not reading.num_begun:
                await asyncio.sleep(0.001)
            await here.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all("has ended" in str(each) for each in results)
            reading.gate.set()

    within(work())
