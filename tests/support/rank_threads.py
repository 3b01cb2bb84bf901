"""A tensor-parallel group of threads: all ranks in one process, one of them running at a time.

A rank runs until it waits in a collective, so that kernels which are not thread-safe (Triton's
interpreter) can run. Plans reach the other ranks as bytes, as between processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from headway import Config, Plan
from headway.executor.base import Executor, Handle
from headway.model.backends.base import Backend
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.loader import load_decoder
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint
from headway.parallel.delta import PlanDecoder, PlanEncoder
from tests.support.waiting import LIMIT

T = TypeVar("T")
CPU = torch.device("cpu")


class Meeting:
    """Where the threads of a group exchange tensors; `baton` is held by the one that runs."""

    def __init__(self, size: int) -> None:
        self.size, self.baton = size, threading.Lock()
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        self.baton.release()
        self.barrier.wait(timeout=LIMIT)
        found = list(self.parts)
        self.barrier.wait(timeout=LIMIT)
        self.baton.acquire()
        return found


@dataclass(eq=False)
class ThreadGroup:
    """One rank's collectives; counts the calls of each kind."""

    meeting: Meeting
    rank: int
    calls: dict[str, int] = field(default_factory=lambda: {"gather": 0, "sum": 0, "broadcast": 0})

    @property
    def size(self) -> int:
        return self.meeting.size

    def _all(self, kind: str, x: Tensor) -> list[Tensor]:
        self.calls[kind] += 1
        found = self.meeting.exchange(self.rank, (kind, x.clone()))
        assert {each for each, _ in found} == {kind}, f"ranks called different collectives: {found}"
        return [part for _, part in found]

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        parts = self._all("gather", x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, 1)

    def sum(self, x: Tensor) -> None:
        parts = self._all("sum", x)
        x.copy_(sum(parts[1:], start=parts[0]))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._all("broadcast", x)[0])


class ThreadRanks:
    """The decoders of all ranks, and a way to run something on all of them."""

    def __init__(
        self,
        size: int,
        open_weights: Callable[[], Checkpoint],
        make_backend: Callable[[ModelConfig], Backend],
        *,
        is_exact: bool = True,
    ) -> None:
        self.meeting = Meeting(size)
        self.groups = [ThreadGroup(self.meeting, rank) for rank in range(size)]
        self.decoders: list[Decoder] = []
        for group in self.groups:
            checkpoint = open_weights()
            backend = make_backend(checkpoint.config)
            shard = Shard(checkpoint.config, group, is_exact)
            self.decoders.append(load_decoder(checkpoint, backend, CPU, shard=shard))

    def run(self, work: Callable[[int], T]) -> list[T]:
        """The results of work(rank), on all ranks at once; rank 0 runs on this thread."""
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            with self.meeting.baton, torch.inference_mode():
                try:
                    found[rank] = work(rank)
                except BaseException as error:
                    found[rank] = error
                    self.meeting.barrier.abort()

        threads = [threading.Thread(target=run, args=[rank]) for rank in range(1, len(self.groups))]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        errors = [each for each in found.values() if isinstance(each, BaseException)]
        for error in sorted(
            errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)
        ):
            raise error
        return [found[rank] for rank in range(len(self.groups))]


class ThreadExecutor:
    """Rank 0's executor; every plan also runs on the others, decoded from bytes."""

    def __init__(
        self, ranks: ThreadRanks, config: Config, make: Callable[[Decoder, Config], Any]
    ) -> None:
        self.ranks = ranks
        self.executors: list[Executor] = [make(decoder, config) for decoder in ranks.decoders]
        self.encoder = PlanEncoder(config.max_num_seqs)
        self.plans = [PlanDecoder(config.max_num_seqs) for _ in ranks.decoders]

    def launch(self, plan: Plan) -> Handle:
        message = self.encoder.encode(plan)

        def launch(rank: int) -> Handle:
            own = self.plans[rank].decode(message) if rank else plan
            handle = self.executors[rank].launch(own)
            if rank:
                handle.wait()
            return handle

        return self.ranks.run(launch)[0]
