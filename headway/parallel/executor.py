"""An executor that sends every plan to the other ranks before it runs it itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from headway.executor.base import Handle
from headway.parallel.delta import PlanEncoder
from headway.parallel.ranks import Ranks
from headway.plan import Plan, StepResult

if TYPE_CHECKING:
    from headway.executor.cpu import CpuExecutor
    from headway.executor.gpu.executor import GpuExecutor
    from headway.executor.gpu.swap import Swapper


@dataclass(slots=True)
class ParallelStep:
    """A plan that all ranks were sent."""

    own: Handle
    ranks: Ranks

    def wait(self) -> StepResult:
        progress = self.ranks.progress
        with self.ranks.guard():
            progress.is_waiting = True
            result = self.own.wait()
            progress.is_waiting = False
            return result


class ParallelExecutor:
    """Rank 0's executor, and the ranks that run the same plans on their parts of the model.

    ExecutorError from every plan after a rank has ended.
    """

    def __init__(self, own: CpuExecutor | GpuExecutor, ranks: Ranks, num_rows: int) -> None:
        self.own, self.ranks, self.sampler = own, ranks, own.sampler
        self.swapper: Swapper | None = getattr(own, "swapper", None)
        self._encoder = PlanEncoder(num_rows)

    @property
    def now(self) -> Callable[[], float]:
        return self.own.now

    def launch(self, plan: Plan) -> ParallelStep:
        self.ranks.check()
        message = self._encoder.encode(plan)
        with uninterrupted(), self.ranks.guard():
            self.ranks.progress.begin_plan()
            self.ranks.send_plan(message)
            own = self.own.launch(plan)
            self.ranks.progress.end_plan()
            return ParallelStep(own, self.ranks)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT: a plan that only some ranks finish would end the group."""
    before, seen = signal.getsignal(signal.SIGINT), list[tuple[int, FrameType | None]]()
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: seen.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen and callable(before):
            before(*seen[0])
