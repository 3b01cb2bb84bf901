"""How many functions of the package lie between a call and its first token.

A hop is a function that is on the stack of a thread when the request changes hands: when it enters
the queue, when it starts to run, and when its token is sampled; on the way back, when the token is
applied and when the output gets it. Helpers that return before that are no hops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import pytest

from headway import LLM, SamplingParams
from tests.support.real import write_tiny

PACKAGE = Path(__file__).parents[2] / "headway"
TO_TOKEN = (
    "scheduler.queue.WaitingQueue.push",
    "scheduler.state.SchedulerState.start",
    "executor.cpu.CpuExecutor._sample",
)
BACK = ("scheduler.results.apply_result", "engine.outputs.OutputBuilder.add_one")
MAX_TO_TOKEN = 20
MAX_BACK = 6  # that are not on the way to the token


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
    names = list(hops.found)
    num_to_token = names.index(TO_TOKEN[-1]) + 1
    assert names[0] == "llm.LLM.generate"
    assert num_to_token <= MAX_TO_TOKEN, names[:num_to_token]
    assert len(names) - num_to_token <= MAX_BACK, names[num_to_token:]
