"""Tokens that go past their reader, straight to the connection: none lost, none before its turn."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
import time
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.engine.async_engine import AsyncEngine
from headway.engine.event_loop import EventLoopBridge, RequestStream
from headway.engine.input_processor import InputProcessor, Prompt
from headway.engine.messages import End, FromLoop, Query, Tokens, ToLoop, Update
from headway.request import Params
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.request_fields import tokens_of
from headway.server.generation.runs import Delta, Run, Straight
from headway.server.http.offload import SHORT
from headway.server.openai.protocol import CompletionRequest
from headway.server.process.ipc import Frames, frame
from tests.support.served import Server, on_loop, server

DONE = End("length", None, None, 0, 0, 0.0, 0.0, 0.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 8


class Outlet:
    """Open or not, by chance; what is written goes with all else that was said."""

    def __init__(self, chance: random.Random, said: list[str]) -> None:
        self.chance, self.said = chance, said
        self.num_written = 0
        self.is_free = False

    @property
    def is_open(self) -> bool:
        self.is_free = self.chance.random() < 0.7
        return self.is_free

    def write(self, body: bytes) -> None:
        assert self.is_free, "written to though it was closed"
        self.is_free = False
        self.said.append(body.decode())
        self.num_written += 1


def form(deltas: list[Delta]) -> bytes:
    return "".join(delta.text for delta in deltas).encode()


def run_of(here: Server, number: int, text: str = LETTERS, **wishes: Any) -> Run:
    context: Context = here.app.state.context
    asked = SamplingParams(max_tokens=len(text), **wishes)
    tokens = list(text.encode())
    return Run(context, f"r{number}", tokens, asked, field="prompt", is_live=True)


async def read(run: Run, outlet: Outlet) -> str:
    """All that a run says, by a reader that now and then takes its time."""
    async for deltas in run.deltas(Straight(outlet, form)):
        outlet.said.append(form(deltas).decode())
        if outlet.chance.random() < 0.3:
            await asyncio.sleep(outlet.chance.random() / 500)
    return "".join(outlet.said)


@pytest.mark.parametrize("seed", range(5))
@on_loop
async def test_texts_are_whole_whichever_way_their_pieces_went(seed: int) -> None:
    async with server(max_model_len=512) as here:
        outlets = [Outlet(random.Random(100 * seed + number), []) for number in range(12)]
        runs = [run_of(here, number) for number in range(12)]
        texts = await asyncio.gather(*map(read, runs, outlets))
        assert set(texts) == {LETTERS.upper()}
        assert sum(outlet.num_written for outlet in outlets) > 0
        await here.settled()


@on_loop
async def test_a_stop_string_ends_what_goes_straight() -> None:
    async with server(max_model_len=512) as here:
        outlet = Outlet(random.Random(1), [])
        assert await read(run_of(here, 0, stop=["XYZ"]), outlet) == "ABCDEFGHIJKLMNOPQRSTUVW"
        await here.settled()


@on_loop
async def test_who_cannot_be_written_fails_alone_and_leaves_nothing() -> None:
    async with server(max_model_len=512) as here:

        def fails(deltas: list[Delta]) -> bytes:
            raise KeyError("no such letter")

        async def read_broken() -> None:
            outlet = Outlet(random.Random(2), [])
            async for _ in run_of(here, 0).deltas(Straight(outlet, fails)):
                pass

        outlet = Outlet(random.Random(3), [])
        broken = asyncio.create_task(read_broken())
        assert await read(run_of(here, 1), outlet) == LETTERS.upper()
        with pytest.raises(KeyError, match="no such letter"):
            await broken
        await here.settled()


@on_loop
async def test_several_samples_never_go_straight() -> None:
    async with server(max_model_len=512) as here:
        outlet = Outlet(random.Random(4), [])
        async for _ in run_of(here, 0, n=2).deltas(Straight(outlet, form)):
            pass
        assert outlet.num_written == 0
        await here.settled()


# A stream and its reader.


@on_loop
async def test_a_sink_is_used_only_while_the_reader_waits() -> None:
    stream, sunk = RequestStream(1), []

    def sink(update: Update) -> bool:
        sunk.append(update.tokens)
        return True

    stream.sink = sink
    stream.put(Update("a", 0, [1]))  # nobody has begun to read
    assert [u.tokens for u in await stream.take()] == [[1]] and not sunk
    stream.put(Update("a", 0, [2]))  # the reader is at work on the first
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert [u.tokens for u in await reader] == [[2]] and not sunk
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put(Update("a", 0, [3]))
    stream.keep(Update("a", 0, [4]))
    stream.put(Update("a", 0, [5], end=DONE))  # after one that waits for the reader
    assert sunk == [[3]]
    assert [u.tokens for u in await reader] == [[4], [5]] and stream.num_open == 0


class Quiet:
    """A port to nowhere; the test says what comes from there."""

    async def open(self, receive: Any) -> None:
        self.receive = receive

    def send(self, messages: list[ToLoop]) -> None: ...
    async def close(self) -> None: ...


@on_loop
async def test_tokens_of_several_steps_come_together() -> None:
    port = Quiet()
    engine = AsyncEngine(port)
    await engine.start()
    with engine.submitted("a", [1], Params()) as stream:
        stream.sink = lambda update: pytest.fail("it is late: its reader has them together")
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        port.receive([Tokens(["a", "b"], [[1], [2]]), Tokens(["a"], [[3, 4]])])
        assert [update.tokens for update in await reader] == [[1], [3, 4]]
        port.receive([Update("a", 0, [], end=DONE)])


# Between threads and processes.


@on_loop
async def test_a_handover_keeps_the_order_and_wakes_no_more_often_than_needed() -> None:
    received: list[list[FromLoop]] = []
    handover = EventLoopBridge(asyncio.get_running_loop(), received.append)

    def deliver() -> None:
        for number in range(1000):
            handover.deliver([Update("a", 0, [number])])

    thread = threading.Thread(target=deliver)
    thread.start()
    time.sleep(0.05)  # the event loop is busy, and the thread goes on
    while sum(map(len, received)) < 1000:
        await asyncio.sleep(0.001)
    thread.join()
    numbers = [m.tokens[0] for batch in received for m in batch if isinstance(m, Update)]
    assert numbers == list(range(1000)) and all(received) and len(received) < 500


@on_loop
async def test_giving_way_ends_when_all_is_received_and_in_time_if_not() -> None:
    received: list[list[FromLoop]] = []
    handover = EventLoopBridge(asyncio.get_running_loop(), received.append)
    waited: list[float] = []

    def deliver(seconds: float) -> None:
        handover.deliver([Tokens([], [])])
        begun = time.perf_counter()
        handover.wait_received(seconds)
        waited.append(time.perf_counter() - begun)

    await asyncio.to_thread(deliver, 10.0)
    assert received and waited[0] < 5.0
    thread = threading.Thread(target=deliver, args=(0.01,))
    thread.start()
    thread.join()  # the event loop is busy with this
    assert len(received) == 1 and 0.01 <= waited[1] < 5.0
    await asyncio.sleep(0.01)
    assert len(received) == 2


values = st.lists(st.lists(st.builds(Query, st.integers(), st.text(max_size=300))), max_size=8)


@given(values, st.lists(st.integers(0, 4000), max_size=12))
def test_frames_are_read_however_they_are_cut(sent: list[list[Query]], cuts: list[int]) -> None:
    data = b"".join(map(frame, sent))
    frames, found = Frames(), []
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(places):
        found += frames.feed(data[start:end])
    assert found == sent
    assert pickle.loads(frame(sent)[8:]) == sent


# Long prompts.


@pytest.mark.parametrize("prompt", [[1] * 999 + ["a"], ["a"] * 999 + [1], [[1] * 999 + ["a"]] * 9])
def test_a_wrong_prompt_has_no_more_problems_than_it_could_be_kinds(prompt: list[Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert caught.value.error_count() <= 4  # to find and list thousands would hold up everybody


@pytest.mark.parametrize("length", [10, SHORT + 1])
@on_loop
async def test_long_prompts_are_looked_at_beside_the_event_loop(length: int) -> None:
    async with server(max_model_len=2 * SHORT) as here:
        before: InputProcessor = here.app.state.context.asking
        asking = Noting(**{each.name: getattr(before, each.name) for each in fields(before)})
        context = replace(here.app.state.context, asking=asking)
        for prompt in ([97] * length, "a" * length):
            Noting.threads.clear()
            [tokens] = await tokens_of(context, [prompt])
            assert len(tokens) == length
            assert (Noting.threads == [threading.get_ident()]) == (length <= SHORT)


class Noting(InputProcessor):
    """Notes on which thread prompts are looked at."""

    threads: ClassVar[list[int]] = []

    def tokens(
        self, prompt: Prompt, max_tokens: int | None = None, *, special: bool = True
    ) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().tokens(prompt, max_tokens, special=special)
