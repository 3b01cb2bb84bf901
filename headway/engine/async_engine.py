"""The engine for asyncio.

    engine = AsyncEngine(llm.engine, input_processor=llm.input_processor)
    await engine.start()
    async for output in engine.generate("Hello, my name is", SamplingParams(max_tokens=20)):
        pass  # output.outputs[0].text is the text so far
    print(output.outputs[0].text)

The engine runs on a thread, or in another process: an `EngineClient` carries the messages. Leaving
an iteration early aborts its request. One AsyncEngine belongs to one event loop. Its `_on_messages`
gets the tokens from the client and puts them into the `RequestStream` of each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import structs

from headway import errors
from headway.checks import token_array
from headway.engine.engine import Engine
from headway.engine.messages import (
    Cancel,
    EngineStopped,
    FromLoop,
    Query,
    QueryResult,
    Refusal,
    Resume,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
)
from headway.engine.outputs import OutputBuilder, RequestOutput
from headway.engine.queue_limits import QueueLimits
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError, ExecutorError, InvalidRequest, Overloaded
from headway.request import RequestParams
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:  # needs the packages for text, which the simulator does without
    from headway.engine.input_processor import InputProcessor, PromptInput

OnMessages = Callable[[list[FromLoop]], None]
Value = TypeVar("Value")


class EngineClient(Protocol):
    """A way to an engine: in this process, in another one, or many engines behind one client.

    All calls and callbacks are on one event loop.
    """

    async def open(self, on_messages: OnMessages) -> None:
        """Connect; `on_messages` is called with each batch of messages, in order.

        An EngineStopped message is the last one: the engine has stopped, or the connection is lost.
        Raises ExecutorError if the engine cannot be reached.
        """

    def send(self, messages: list[ToLoop]) -> None:
        """Send messages in order; never blocks, and drops them if the connection is lost."""

    async def close(self) -> None:
        """Disconnect; the requests of this client end."""


class RequestStream:
    """Updates of one request that its reader has not taken yet.

    While the reader waits, a sink may consume updates directly. This avoids waking the reader's
    task, which is most of the cost of a streamed token. Sinks and reader share one event loop.
    """

    __slots__ = ("_reader", "num_open", "pending", "refusal", "sink", "token_sink")

    def __init__(self, num_samples: int) -> None:
        self.num_open = num_samples  # samples whose end the reader has not taken
        self.pending: list[SampleUpdate] = []
        self.refusal: Exception | None = None
        # Takes updates directly; returns False if the reader must take one.
        self.sink: Callable[[SampleUpdate], bool] | None = None
        # The same for tokens of sample 0 that come with nothing else, as most do.
        self.token_sink: Callable[[list[int]], bool] | None = None
        self._reader: asyncio.Future[None] | None = None  # of a waiting reader

    def put(self, update: SampleUpdate) -> None:
        """Give an update to the sink if the reader waits with nothing pending, else keep it."""
        if self._reader is None or self.sink is None or not self.sink(update):
            self.keep(update)

    def put_tokens(self, id: str, tokens: list[int]) -> None:
        """As `put`, for new tokens of sample 0."""
        if self._reader is None or self.token_sink is None or not self.token_sink(tokens):
            self.put(SampleUpdate(id, 0, tokens))

    def keep(self, update: SampleUpdate) -> None:
        """Keep an update for the reader, which takes all pending updates at once."""
        self.pending.append(update)
        if self._reader is not None:
            self._wake(self._reader)

    def fail(self, error: Exception) -> None:
        """Make `take` raise this error after the pending updates."""
        self.refusal = error
        if self._reader is not None:
            self._wake(self._reader)

    async def take(self) -> list[SampleUpdate]:
        """All pending updates; waits for at least one. Raises the error that ended the request."""
        if not self.pending and self.refusal is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self.pending:
            assert self.refusal is not None, "woken without an update or an error"
            raise self.refusal
        taken, self.pending = self.pending, []
        for update in taken:
            if update.end is not None:
                self.num_open -= 1
        return taken

    def _wake(self, reader: asyncio.Future[None]) -> None:
        self._reader = None
        if not reader.done():  # it may have been cancelled
            reader.set_result(None)


class AsyncEngine:
    """Requests by id, each with a stream of outputs."""

    def __init__(
        self,
        engine: Engine | EngineClient,
        limits: QueueLimits | None = None,
        *,
        input_processor: InputProcessor | None = None,
    ) -> None:
        self.client: EngineClient = (
            ThreadClient(engine, limits) if isinstance(engine, Engine) else engine
        )
        self.input_processor = input_processor  # needed by `generate`
        self.stop_reason: str | None = None  # why the engine has stopped; None while it runs
        self.is_closing = False  # new requests are refused
        self._streams: dict[str, RequestStream] = {}
        self._abandoned: dict[str, int] = {}  # open samples of requests without a reader
        self._pending_queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()

    async def start(self) -> None:
        await self.client.open(self._on_messages)

    async def close(self) -> None:
        """Stop the engine; open requests fail with ExecutorError."""
        await self.client.close()

    def cancel_all(self) -> None:
        """Abort all open requests, which end with reason abort, and refuse new ones."""
        self.is_closing = True
        self.client.send([Cancel(id) for id in self._streams])

    def fail_all(self) -> None:
        """End all open requests here with an error; the engine may not answer in time."""
        for stream in self._streams.values():
            stream.fail(Overloaded("the server is shutting down"))

    @property
    def warning(self) -> str | None:
        """What limits a fleet that works: the list of its replicas may be old, for example."""
        return getattr(self.client, "problem", None)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield everything generated so far, each time there is more; the last is `finished`.

        `prompt` is a text, token ids, or a dict with `prompt` or `prompt_token_ids`. Raises the
        RequestError or PolicyError of a refused request. A request that fails while it runs ends
        with finish_reason error. Leaving the iteration early aborts the request.
        """
        processor = self.input_processor
        if processor is None:
            raise ConfigError("AsyncEngine.generate needs AsyncEngine(..., input_processor=...)")
        if sampling_params is None:
            sampling_params = SamplingParams()
        id = f"generate-{next(self._numbers)}" if request_id is None else request_id
        text, tokens = processor.read_prompt(prompt)
        params = processor.params(sampling_params, id)
        builder = OutputBuilder(
            id, tokens, sampling_params, processor.tokenizer, partial(self.stop_sample, id),
            hidden=params.stops, is_live=True, prompt_text=text,
        )  # fmt: skip
        with self.submitted(id, builder.prompt_token_ids, params) as stream:
            while stream.num_open:
                builder.add(await stream.take())
                yield builder.output()

    async def abort(self, request_id: str) -> None:
        """End a request with finish_reason abort; does nothing if it has already ended."""
        if request_id in self._streams:
            self.client.send([Cancel(request_id)])

    async def stream(
        self, id: str, prompt: Sequence[int], params: RequestParams
    ) -> AsyncIterator[list[SampleUpdate]]:
        """Yield the updates of a request, without text, until all its samples have ended.

        Raises the error of a refused request. Leaving the iteration early aborts the request.
        """
        with self.submitted(id, prompt, params) as stream:
            while stream.num_open:
                yield await stream.take()

    @contextmanager
    def submitted(
        self,
        id: str,
        prompt: Sequence[int],
        params: RequestParams,
        traceparent: str = "",
        held: tuple[str, str] | None = None,
    ) -> Iterator[RequestStream]:
        """Submit a request. Leaving the context aborts the request unless it has ended.

        `held`: the answer to FindRequest, to resume a request of a lost client from its first token.
        The prompt is read here, so that an exception of its own ends this request alone.
        """
        self._check_id(id)
        tokens = token_array(f"request {id!r}: prompt", prompt)
        # An invalid n gives a single Refusal.
        num_samples = params.n if isinstance(params.n, int) else 1
        stream = self._streams[id] = RequestStream(max(1, num_samples))
        try:
            submit = Submit(id, tokens, params, traceparent)
            self.client.send([submit if held is None else Resume(submit, held[1], held[0])])
            yield stream
        finally:
            del self._streams[id]
            num_open = stream.num_open - sum(u.end is not None for u in stream.pending)
            if num_open and stream.refusal is None and self.stop_reason is None:  # it still runs
                self._abandoned[id] = num_open
                self.client.send([Cancel(id)])

    def _check_id(self, id: str) -> None:
        """Raise unless a request with this id can be submitted now."""
        if id in self._streams or id in self._abandoned:
            raise InvalidRequest(
                f"request {id!r}: this id is used by an open request; choose another id"
            )
        if self.stop_reason is not None:
            raise ExecutorError(f"the engine has stopped: {self.stop_reason}")
        if self.is_closing:
            raise Overloaded("the server is shutting down and accepts no new requests")

    def stop_sample(self, id: str, sample: int) -> None:
        """End one sample as if a stop token had ended it; its end arrives as an update."""
        self.client.send([Cancel(id, sample)])

    async def ask(self, query: Query[Value]) -> Value:
        """The answer to a query; ExecutorError if it fails, or if the engine does not answer it."""
        if self.stop_reason is not None:
            raise ExecutorError(f"the engine has stopped: {self.stop_reason}")
        number = next(self._numbers)
        future = self._pending_queries[number] = asyncio.get_running_loop().create_future()
        self.client.send([structs.replace(query, number=number)])
        try:
            answer: Value = await future
            return answer
        finally:
            del self._pending_queries[number]

    def _on_messages(self, messages: list[FromLoop]) -> None:
        # Messages of several steps: the readers are behind, and get their updates together.
        is_late = sum(isinstance(message, TokenBatch) for message in messages) > 1
        for message in messages:
            if isinstance(message, TokenBatch):
                self._take_tokens(message, is_late)
            elif isinstance(message, SampleUpdate):
                self._put(message)
            elif isinstance(message, Refusal):
                if stream := self._streams.get(message.id):
                    stream.fail(_error_of(message))
                self._abandoned.pop(message.id, None)
            elif isinstance(message, QueryResult):
                self._set_result(message)
            elif isinstance(message, EngineStopped):
                self._end(message)

    def _take_tokens(self, batch: TokenBatch, is_late: bool) -> None:
        for id, tokens in zip(batch.ids, batch.tokens, strict=True):
            if stream := self._streams.get(id):
                if is_late:
                    stream.keep(SampleUpdate(id, 0, tokens))
                else:
                    stream.put_tokens(id, tokens)

    def _put(self, update: SampleUpdate) -> None:
        """Pass an update to its stream; without one, free the id once the last sample has ended."""
        if stream := self._streams.get(update.id):
            stream.put(update)
        elif update.end is not None:
            if self._abandoned.get(update.id, 0) > 1:
                self._abandoned[update.id] -= 1
            else:
                self._abandoned.pop(update.id, None)

    def _set_result(self, reply: QueryResult) -> None:
        future = self._pending_queries.get(reply.number)
        if future is not None and not future.done():
            if reply.error is None:
                future.set_result(reply.value)
            else:
                future.set_exception(ExecutorError(reply.error))

    def _end(self, message: EngineStopped) -> None:
        self.stop_reason = message.reason
        self._abandoned.clear()
        error = ExecutorError(f"the engine has stopped: {message.reason}")
        for stream in self._streams.values():
            stream.fail(error)
        for future in self._pending_queries.values():
            if not future.done():
                future.set_exception(error)


def _error_of(refusal: Refusal) -> Exception:
    """The error that refused the request, as the loop raised it."""
    kind: type[Exception] = getattr(errors, refusal.kind, ExecutorError)
    return kind(refusal.message, **refusal.fields)
