"""How many functions of the package lie between a call and its first token.

A hop is a function that is on the stack of a thread when the request changes hands: when it enters
the queue, when it starts to run, and when its token is sampled; on the way back, when the token is
applied and when the output gets it. Helpers that return before that are no hops.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import httpx
import pytest

from headway import LLM, SamplingParams
from headway.engine.async_engine import AsyncEngine
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.settings import Settings
from tests.support.real import write_tiny

PACKAGE = Path(__file__).parents[2] / "headway"
OVERVIEW = PACKAGE.parent / "docs" / "architecture.md"
TO_TOKEN = (
    "scheduler.queue.WaitingQueue.push",
    "scheduler.state.SchedulerState.admit",
    "executor.cpu.CpuExecutor._sample",
)
BACK = ("scheduler.results.apply_result", "engine.outputs.OutputBuilder.add_one")
MAX_TO_TOKEN = 18
MAX_BACK = 6  # that are not on the way to the token
# Between a request to a server and its event, without the connection of uvicorn.
POSTED = ("server.openai.completions.completions", "engine.loop.EngineLoop.post")
ANSWERED = (
    "engine.thread_client.EventLoopBridge.deliver",
    "engine.async_engine.AsyncEngine._on_messages",
    "server.generation.stream.CancellableResponse._send",
)
NAMED_IN = (
    "engine/async_engine", "engine/engine", "engine/offline", "engine/outputs", "llm",
    "remote/client", "remote/service", "server/generation/prompt_runs", "server/generation/stream", "server/http/connection",
    "server/openai/chat",
)  # fmt: skip
MAX_POST_TO_TOKEN = 32
MAX_BACK_TO_CLIENT = 13


def name_of(code: CodeType) -> str | None:
    """Module and qualified name; None outside the package. A comprehension is its function."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return f"{module}.{code.co_qualname}".partition(".<locals>.<")[0]


class Hops:
    """The functions on the stacks at the first call of each mark, in the order of the calls."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.left = set(marks)
        self.found: dict[str, None] = {}
        # By code object: to name a function takes longer than to call it.
        self._marked: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self.left:
            return
        code = frame.f_code
        if code not in self._marked:
            name = name_of(code)
            self._marked[code] = name if name in self.left else None
        if (mark := self._marked[code]) in self.left:
            self.left.discard(mark or "")
            names = [name_of(each.f_code) for each in stack_of(frame)]
            self.found |= dict.fromkeys(name for name in reversed(names) if name)


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def profiled(hook: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Call the hook for every call of this thread, and of threads that start meanwhile."""
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    with LLM(str(folder), device="cpu", num_blocks=64, block_size=16) as made:
        yield made


def test_few_functions_lie_between_generate_and_its_first_token(llm: LLM) -> None:
    hops = Hops(TO_TOKEN + BACK)
    with profiled(hops):
        [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=1))
    assert len(output.outputs[0].token_ids) == 1 and not hops.left
    assert next(iter(hops.found)) == "llm.LLM.generate"
    check_limits(hops, MAX_TO_TOKEN, MAX_BACK)


def test_few_functions_lie_between_a_post_and_its_first_token(llm: LLM) -> None:
    hops = Hops(POSTED + TO_TOKEN + BACK + ANSWERED)
    context = Context(
        engine=AsyncEngine(llm.engine), input_processor=llm.input_processor, model_name="tiny",
        max_model_len=llm.config.max_model_len, settings=Settings(), fingerprint="fp_test",
    )  # fmt: skip
    app = create_app(context)

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with profiled(hops):
                await context.engine.start()  # its thread is profiled, too
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "stream": True}
                response = await client.post("/v1/completions", json=body)
        await context.engine.close()
        return response

    response = asyncio.run(post())
    assert response.status_code == 200 and not hops.left
    check_limits(hops, MAX_POST_TO_TOKEN, MAX_BACK_TO_CLIENT)
    listed = listed_hops()
    assert len(listed) > 20 and [name for name in hops.found if name in listed] == listed


def listed_hops() -> list[str]:
    """The functions in the overview's list of calls, which have a path in the next column."""
    lines = OVERVIEW.read_text(encoding="utf-8").splitlines()
    found = [re.match(r" +([\w.]+) +(\w+/\S+)\.py", line) for line in lines]
    return [f"{match[2].replace('/', '.')}.{match[1]}" for match in found if match]


def test_every_function_in_the_overview_exists() -> None:
    """In the text after the list, too: names with a dot."""
    modules = [importlib.import_module(f"headway.{name.replace('/', '.')}") for name in NAMED_IN]
    text = OVERVIEW.read_text(encoding="utf-8").partition("In two processes")[2]
    names = re.findall(r"`([A-Z]\w+)\.(\w+)`", text.partition("## One step")[0])
    for owner, attribute in names:
        assert any(hasattr(getattr(each, owner, None), attribute) for each in modules), attribute
    assert len(names) > 8


def check_limits(hops: Hops, max_to_token: int, max_back: int) -> None:
    names = list(hops.found)
    num_to_token = names.index(TO_TOKEN[-1]) + 1
    assert num_to_token <= max_to_token, names[:num_to_token]
    assert len(names) - num_to_token <= max_back, names[num_to_token:]
