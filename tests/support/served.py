"""A server without a model or sockets: bytes are tokens; the output is the prompt in capitals."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI, routing
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headway import Engine, Request, Scheduler, preset
from headway.engine.async_engine import AsyncEngine
from headway.engine.clock import Clock
from headway.engine.input_processor import InputProcessor
from headway.engine.queries import GetMetrics
from headway.engine.queue_limits import QueueLimits
from headway.engine.thread_client import ThreadClient
from headway.plan import Embedding, Plan, StepResult
from headway.sampling_params import Sampling, TokenLogprobs, pack_top
from headway.server import app as app_module
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.settings import Settings
from headway.text.tokenizer import ALPHABET, Tokenizer
from tests.support.drive import result
from tests.support.waiting import LIMIT, on_loop, until

START, END = 256, 257
VOCAB_SIZE = 260
HIDDEN_SIZE = 8
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>?'
)
CHAT_TEMPLATE = (  # also renders calls
    "{% for message in messages %}{{ message.role }}:{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MODEL = "letters"

# All apps have the same response models, whose validators take most of the time to make an app.
routing.create_model_field = functools.cache(routing.create_model_field)  # type: ignore[assignment]


def letters(template: str = TEMPLATE, bos: str = "", specials: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer: each byte is a token; 256 and 257 begin and end messages; `bos` begins texts.

    `specials` are further special tokens, from 258 on.
    """
    backend = Backend(models.BPE(vocab=dict(ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<start>"), AddedToken("<end>"), *map(AddedToken, specials)]
    )
    if bos:
        added = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, added)
    return Tokenizer(backend, bos=bos, eos="<end>", chat_template=template)


def capitals(request: Request, place: int) -> int:
    """The prompt in capitals, then the end; sample k starts at letter k."""
    number = place - request.num_prompt + request.sample
    if number >= request.num_prompt:
        return END
    return bytes([request.prompt[number] % 256]).upper()[0]


@dataclass
class Scores:
    """Like the torch executor's results: a made-up logprob for every requested token."""

    logprobs: dict[Request, list[TokenLogprobs]] = field(default_factory=dict)
    prompt: dict[Request, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    embeddings: dict[Request, Embedding] = field(default_factory=dict)


def embedding(prompt: Sequence[int], pooling: str) -> Embedding:
    """A unit vector of letter counts, modulo HIDDEN_SIZE, over all tokens or the last one."""
    pooled = prompt if pooling == "mean" else prompt[-1:]
    counts = np.bincount(np.array(pooled) % HIDDEN_SIZE, minlength=HIDDEN_SIZE)
    return (counts / np.linalg.norm(counts)).astype(np.float32)


def score(token: int, num_top: int) -> TokenLogprobs:
    top = [(token + step, -0.5 - step) for step in range(num_top)]
    return TokenLogprobs(token, -0.5, 1, pack_top(top))


class Capitals:
    """An executor; `gate` blocks every step while it is closed, `fault` makes the next step fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.says: Sequence[int] | None = None  # a fixed output for all requests
        self.prompts: list[Sequence[int]] = []  # of all requests
        self.num_free_steps: int | None = None  # steps until the gate closes
        self.seconds = 0.0  # of every step
        self.is_blocked = False  # a step waits at the gate

    def launch(self, plan: Plan) -> Capitals:
        if self.num_free_steps is not None:
            self.num_free_steps -= 1
            if self.num_free_steps < 0:
                self.num_free_steps = None
                self.gate.clear()
        while not self.gate.wait(0.01) and self.fault is None:
            self.is_blocked = True
        self.is_blocked = False
        if self.fault is not None:
            fault, self.fault = self.fault, None
            self.gate.set()
            raise fault
        time.sleep(self.seconds)
        self._result = result(plan, self._sample)
        self._result.extra = self._scores(plan)
        return self

    def wait(self) -> StepResult:
        return self._result

    def _sample(self, request: Request, place: int) -> int:
        if place == request.num_prompt:
            self.prompts.append(request.prompt)
        if self.says is None:
            return capitals(request, place)
        number = place - request.num_prompt
        return self.says[number] if number < len(self.says) else END

    def _scores(self, plan: Plan) -> Scores | None:
        found = Scores()
        for request, tokens in self._gained(plan):
            sampling = request.params.sampling
            if isinstance(sampling, Sampling) and sampling.logprobs is not None:
                found.logprobs[request] = [score(token, sampling.logprobs) for token in tokens]
        for request, start, end, *_ in plan.chunks:
            sampling = request.params.sampling
            if isinstance(sampling, Sampling) and sampling.prompt_logprobs is not None:
                places = range(start + 1, min(end + 1, request.num_prompt))
                num_top = sampling.prompt_logprobs
                found.prompt[request] = [(p, score(request.prompt[p], num_top)) for p in places]
            if request.params.pooling is not None and end == request.num_prompt:
                found.embeddings[request] = embedding(request.prompt, request.params.pooling)
        return found if found.logprobs or found.prompt or found.embeddings else None

    def _gained(self, plan: Plan) -> Iterator[tuple[Request, list[int]]]:
        for row, request in enumerate(plan.decodes):
            yield request, [int(column[row]) for column in self._result.decode_tokens]
        for draft, tokens in zip(plan.drafts, self._result.draft_tokens, strict=True):
            yield draft.request, tokens
        sampled = (chunk.request for chunk in plan.chunks if chunk.is_last)
        for request, token in zip(sampled, self._result.first_tokens, strict=True):
            yield request, [token]


@dataclass
class Server:
    """A running server with its client, engine and executor."""

    client: httpx.AsyncClient
    app: FastAPI
    engine: AsyncEngine
    executor: Capitals
    engine_client: ThreadClient

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.client.post(path, json=fields)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """The response body of a successful completion."""
        response = await self.post("/v1/completions", **fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def settled(self) -> None:
        """Wait until no request is open; times out if one leaks."""
        scheduler = self.engine_client.loop.engine.scheduler
        await until(lambda: not self.engine.num_open and scheduler.is_idle)


@asynccontextmanager
async def server(
    limits: QueueLimits | None = None,
    max_model_len: int = 256,
    template: str = TEMPLATE,
    vocab_size: int = VOCAB_SIZE,
    policies: Mapping[str, Any] | None = None,
    bos: str = "",
    specials: Sequence[str] = (),
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    executor = Capitals()
    numbers = {"max_model_len": max_model_len, "num_blocks": 256, "block_size": 16}
    config = preset("headway", **numbers, **(policies or {}))
    engine_client = ThreadClient(Engine(Scheduler(config), executor, clock), limits)
    engine_client.loop.handle(GetMetrics, lambda query: f"# {query.prefix}\n")
    engine = AsyncEngine(engine_client)
    tokenizer = letters(template, bos, specials)
    processor = InputProcessor(
        tokenizer=tokenizer, vocab_size=vocab_size + len(specials), hidden_size=HIDDEN_SIZE,
        eos_ids=tokenizer.eos_ids,
    )  # fmt: skip
    context = Context(
        engine=engine, input_processor=processor, model_name=MODEL, max_model_len=max_model_len,
        settings=Settings(**settings), fingerprint="fp_test",
    )  # fmt: skip
    await engine.start()
    app = create_app(context)
    transport = httpx.ASGITransport(app=app)
    before, app_module.ENGINE_TIMEOUT = app_module.ENGINE_TIMEOUT, LIMIT
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Server(client, app, engine, executor, engine_client)
    finally:
        app_module.ENGINE_TIMEOUT = before
        executor.gate.set()
        await engine.close()


def with_server(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an async test like `on_loop`; its first argument is a server with these options."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        async def run(*args: Any, **names: Any) -> None:
            async with server(**options) as here:
                await test(here, *args, **names)

        signature = inspect.signature(test)
        own = list(signature.parameters.values())[1:]  # those that pytest fills
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return on_loop(run)

    return decorate
