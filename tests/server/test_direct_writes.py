"""Direct chunk writes: tokens that bypass the reader are neither lost nor reordered."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import fields, replace
from itertools import count
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from headway import AsyncEngine, SamplingParams
from headway.engine.async_engine import RequestStream
from headway.engine.input_processor import InputProcessor, Prompt
from headway.engine.messages import FinishInfo, FromLoop, SampleUpdate, TokenBatch, ToLoop
from headway.engine.thread_client import EventLoopBridge
from headway.request import RequestParams
from headway.server.context import Context
from headway.server.generation.prompt_runs import Delta, DirectWriter, PromptRun
from headway.server.generation.prompts import tokens_of
from headway.server.http.offload import MAX_INLINE_SIZE
from headway.server.openai.chat import chat as chat_of
from headway.server.openai.completions import completions
from headway.server.openai.protocol import ChatRequest, CompletionRequest
from tests.support.served import Server, with_server
from tests.support.waiting import LIMIT, on_loop, until

DONE = FinishInfo("length", None, None, 0, 0, 0.0, 0.0, 0.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz" * 8


class RandomWriter:
    """A chunk writer that is open at random; its writes are recorded with all other output."""

    def __init__(self, chance: random.Random, output: list[str]) -> None:
        self.chance, self.output = chance, output
        self.num_written = 0
        self.is_free = False

    @property
    def is_open(self) -> bool:
        self.is_free = self.chance.random() < 0.7
        return self.is_free

    def write(self, body: bytes) -> None:
        assert self.is_free, "a closed writer was written to"
        self.is_free = False
        self.output.append(body.decode())
        self.num_written += 1


def form(deltas: list[Delta]) -> bytes:
    return "".join(delta.text for delta in deltas).encode()


def run_of(here: Server, number: int, text: str = LETTERS, **options: Any) -> PromptRun:
    context: Context = here.app.state.context
    sampling_params = SamplingParams(max_tokens=len(text), **options)
    tokens = list(text.encode())
    return PromptRun(context, f"r{number}", tokens, sampling_params, field="prompt", is_live=True)


async def read(run: PromptRun, writer: RandomWriter) -> str:
    """All output of a run, read by a consumer that pauses at random."""
    text_event = writer.chance.choice([None, str.encode])
    async for deltas in run.deltas(DirectWriter(writer, form, text_event)):
        writer.output.append(form(deltas).decode())
        if writer.chance.random() < 0.3:
            await asyncio.sleep(writer.chance.random() / 500)
    return "".join(writer.output)


@pytest.mark.parametrize("seed", range(5))
@with_server(max_model_len=512)
async def test_texts_are_complete_with_any_mix_of_direct_writes(here: Server, seed: int) -> None:
    num_written = 0
    while not num_written:  # none if the event loop is always behind the engine
        writers = [RandomWriter(random.Random(100 * seed + number), []) for number in range(12)]
        runs = [run_of(here, number) for number in range(12)]
        texts = await asyncio.gather(*map(read, runs, writers))
        assert set(texts) == {LETTERS.upper()}
        num_written = sum(writer.num_written for writer in writers)
        await here.settled()


@with_server(max_model_len=512)
async def test_a_stop_string_ends_direct_writes(here: Server) -> None:
    writer = RandomWriter(random.Random(1), [])
    assert await read(run_of(here, 0, stop=["XYZ"]), writer) == "ABCDEFGHIJKLMNOPQRSTUVW"
    await here.settled()


@with_server(max_model_len=512)
async def test_a_failed_direct_write_fails_only_its_request(here: Server) -> None:
    def fails(_: object) -> bytes:
        raise KeyError("no such letter")

    async def read_broken() -> None:
        writer = RandomWriter(random.Random(2), [])
        for number in count(2):  # until the event loop is not behind the engine
            text_event = fails if number % 2 else None
            async for _ in run_of(here, number).deltas(DirectWriter(writer, fails, text_event)):
                pass

    writer = RandomWriter(random.Random(3), [])
    broken = asyncio.create_task(read_broken())
    assert await read(run_of(here, 1), writer) == LETTERS.upper()
    with pytest.raises(KeyError, match="no such letter"):
        await broken
    await here.settled()


PLAIN: dict[str, Any] = {"stream": True, "max_tokens": 8}
NOT_PLAIN = [
    {"n": 2}, {"logprobs": 1}, {"return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, *NOT_PLAIN])
@with_server(max_model_len=512)
async def test_a_text_alone_makes_the_same_event_as_its_delta(here: Server, more: Any) -> None:
    context: Context = here.app.state.context
    texts = ["a", " b", '"quoted"\n', "\u00e9\U0001f600", "\u2028\x00"]
    body = CompletionRequest.model_validate({**PLAIN, "prompt": "abc", **more})
    chat = {"logprobs": True} if "logprobs" in more else more
    messages = [{"role": "user", "content": "abc"}]
    for output in (
        await completions(context, body, True),
        await chat_of(
            context, ChatRequest.model_validate({**PLAIN, "messages": messages, **chat}), True
        ),
    ):
        text_event = output.text_event()
        assert (text_event is None) == (more in NOT_PLAIN)
        for text in texts if text_event else ():
            assert text_event(text) == output.encode([Delta(0, text)])


@with_server(max_model_len=512)
async def test_several_samples_are_never_written_directly(here: Server) -> None:
    writer = RandomWriter(random.Random(4), [])
    async for _ in run_of(here, 0, n=2).deltas(DirectWriter(writer, form)):
        pass
    assert writer.num_written == 0
    await here.settled()


@on_loop
async def test_a_sink_is_used_only_while_the_reader_waits() -> None:
    stream, sunk = RequestStream(1), []

    def sink(update: SampleUpdate) -> bool:
        sunk.append(update.tokens)
        return True

    def token_sink(tokens: list[int]) -> bool:
        sunk.append(tokens)
        return tokens != [7]

    stream.sink, stream.token_sink = sink, token_sink
    stream.put(SampleUpdate("a", 0, [1]))  # no reader yet
    assert [u.tokens for u in await stream.take()] == [[1]] and not sunk
    stream.put(SampleUpdate("a", 0, [2]))  # the reader is processing the first
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert [u.tokens for u in await reader] == [[2]] and not sunk
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.put(SampleUpdate("a", 0, [3]))
    stream.put_tokens("a", [6])
    stream.put_tokens("a", [7])  # refused, so the other sink gets it
    stream.keep(SampleUpdate("a", 0, [4]))
    stream.put_tokens("a", [8])  # an earlier one waits for the reader
    stream.put(SampleUpdate("a", 0, [5], end=DONE))
    assert sunk == [[3], [6], [7], [7]]
    assert [u.tokens for u in await reader] == [[4], [8], [5]] and stream.num_open == 0


class Quiet:
    """A client without an engine; the test injects its messages."""

    async def open(self, receive: Any) -> None:
        self.receive = receive

    def send(self, messages: list[ToLoop]) -> None: ...
    async def close(self) -> None: ...


@on_loop
async def test_tokens_of_several_steps_arrive_together() -> None:
    client = Quiet()
    engine = AsyncEngine(client)
    await engine.start()
    with engine.submitted("a", [1], RequestParams()) as stream:
        stream.sink = lambda update: pytest.fail("it is late: its reader has them together")
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        client.receive([TokenBatch(["a", "b"], [[1], [2]]), TokenBatch(["a"], [[3, 4]])])
        assert [update.tokens for update in await reader] == [[1], [3, 4]]
        client.receive([SampleUpdate("a", 0, [], end=DONE)])


@on_loop
async def test_the_event_loop_bridge_keeps_order_and_wakes_rarely() -> None:
    received: list[list[FromLoop]] = []
    bridge = EventLoopBridge(asyncio.get_running_loop(), received.append)

    half = threading.Event()

    def deliver() -> None:
        for number in range(1000):
            if number == 500:
                half.set()
            bridge.deliver([SampleUpdate("a", 0, [number])])

    thread = threading.Thread(target=deliver)
    thread.start()
    assert half.wait(LIMIT)  # the event loop is busy with this
    await until(lambda: sum(map(len, received)) == 1000)
    thread.join()
    numbers = [m.tokens[0] for batch in received for m in batch if isinstance(m, SampleUpdate)]
    assert numbers == list(range(1000)) and all(received) and len(received[0]) >= 500


@on_loop
async def test_giving_way_ends_when_all_is_received_or_in_time() -> None:
    received: list[list[FromLoop]] = []
    bridge = EventLoopBridge(asyncio.get_running_loop(), received.append)
    waited: list[float] = []

    def deliver(seconds: float) -> None:
        bridge.deliver([TokenBatch([], [])])
        begun = time.perf_counter()
        bridge.wait_received(seconds)
        waited.append(time.perf_counter() - begun)

    await asyncio.to_thread(deliver, LIMIT)  # which would end this test
    assert received
    thread = threading.Thread(target=deliver, args=(0.01,))
    thread.start()
    thread.join()  # the event loop is busy with this
    assert len(received) == 1 and waited[1] >= 0.01
    await until(lambda: len(received) == 2)


@pytest.mark.parametrize("prompt", [[1] * 999 + ["a"], ["a"] * 999 + [1], [[1] * 999 + ["a"]] * 9])
def test_a_wrong_prompt_has_at_most_one_error_per_union_member(prompt: list[Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert caught.value.error_count() <= 4  # listing thousands of errors would block the event loop


@pytest.mark.parametrize("length", [10, MAX_INLINE_SIZE + 1])
@with_server(max_model_len=2 * MAX_INLINE_SIZE)
async def test_long_prompts_are_tokenized_off_the_event_loop(here: Server, length: int) -> None:
    before: InputProcessor = here.app.state.context.input_processor
    processor = Noting(**{each.name: getattr(before, each.name) for each in fields(before)})
    context = replace(here.app.state.context, input_processor=processor)
    for prompt in ([97] * length, "a" * length):
        Noting.threads.clear()
        [tokens] = await tokens_of(context, [prompt])
        assert len(tokens) == length
        assert (Noting.threads == [threading.get_ident()]) == (length <= MAX_INLINE_SIZE)


class Noting(InputProcessor):
    """Records the thread on which prompts are tokenized."""

    threads: ClassVar[list[int]] = []

    def tokens(
        self, prompt: Prompt, max_tokens: int | None = None, *, special: bool = True
    ) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().tokens(prompt, max_tokens, special=special)
