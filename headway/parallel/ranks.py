"""Starts the other ranks of a tensor-parallel group and sends them commands and plans.

Rank 0 is this process. The others are children that are started with an interpreter of their own,
or processes on other machines.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import finalize

import msgspec
import torch
import torch.distributed as dist

from headway.config import Config
from headway.errors import ConfigError, ExecutorError
from headway.model.config import ModelConfig
from headway.model.sharding import Shard
from headway.parallel.group import Group, connect
from headway.parallel.launch import RankLauncher, start_rank
from headway.parallel.link import launch
from headway.parallel.progress import Progress, SharedState, anonymous_file
from headway.parallel.spec import (
    CountBlocks,
    RankSpec,
    Start,
    config_sizes,
    decode_reply,
    framed,
    messages,
)
from headway.parallel.watch import INTERVAL, RankProcess, Watch

EXPLAIN_SECONDS = 0.5  # how long an error of a collective waits for its cause


class Ranks:
    """The ranks from 1 on. ExecutorError from every method once one of them has ended."""

    def __init__(self, spec: RankSpec, launcher: RankLauncher | None = None) -> None:
        """`launcher` starts the ranks, if they run on other machines."""
        self.spec = spec
        self._files = anonymous_file(), anonymous_file()  # to connect; shared memory
        self._store: int | dist.Store = self._files[0]
        shared, self._host = SharedState(self._files[1], 0), "127.0.0.1"
        if launcher is None:
            self._processes = [self._start(rank) for rank in range(1, spec.size)]
        else:
            self._store, self._host = dist.HashStore(), launcher.host()
            ranks = launch(launcher, spec.size, spec.threads, self._files[1], self._store)
            self._processes = [
                RankProcess(each.rank, each, each.links[False], each.replies, each.host)
                for each in ranks
            ]
        self.progress = Progress()
        self.watch = Watch(self._processes, shared, self.progress)
        self.close = finalize(self, _close, self.watch, self._files, os.getpid())
        self._send(spec)

    def _start(self, rank: int) -> RankProcess:
        own, theirs = socket.socketpair()
        with theirs:
            process = start_rank(self.spec.threads, rank, theirs.fileno(), *self._files)
        return RankProcess(rank, process, own, own.makefile("rb"))

    def connect(self, model: ModelConfig) -> Shard:
        """Connect the ranks; returns rank 0's part of the model."""
        found: list[Group | Exception] = []
        device = torch.device(self.spec.device(0))

        def join() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # of this thread
                found.append(
                    connect(self._store, 0, self.spec.size, device, self.progress, self._host)
                )
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=join, name="connect ranks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(INTERVAL)
            self.check()
        group = found[0]
        if isinstance(group, Exception):
            raise ExecutorError(self.watch.wait(EXPLAIN_SECONDS) or str(group)) from group
        self.watch.end_collectives = group.abort
        return Shard(model, group, self.spec.is_exact)

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have their weights; ConfigError if one cannot load them."""
        self._receive()

    def count_blocks(self, config: Config, utilization: float, own: Callable[[], int]) -> int:
        """KV blocks that fit on every device; `own` counts those of rank 0."""
        self._send(CountBlocks(config_sizes(config), utilization))
        with self.guard():
            fitting = own()
        return min([fitting, *(count for count in self._receive() if count is not None)])

    def start(self, config: Config, make_own: Callable[[], Any], *, enforce_eager: bool) -> Any:
        """Create the executors of all ranks; returns that of rank 0. Plans can be sent then."""
        self._send(Start(config_sizes(config), enforce_eager))
        with self.guard():
            own = make_own()
        self._receive()
        self.watch.is_loading = False
        return own

    def send_plan(self, message: bytes) -> None:
        """Send an encoded plan to all ranks; waits while a rank has too many of them."""
        data = framed(message)
        for each in self._processes:
            with suppress(ConnectionError):  # the watch sees it
                each.control.sendall(data)

    def check(self) -> None:
        """ExecutorError if a rank has ended."""
        if self.watch.failure is not None:
            raise ExecutorError(self.watch.failure)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guard work with collectives: an error in it ends the group, and names the cause."""
        try:
            yield
        except BaseException as error:
            if self.watch.wait(EXPLAIN_SECONDS) is None:
                self.watch.fail(f"rank 0 failed: {type(error).__name__}: {error}")
                raise
            raise ExecutorError(self.watch.failure) from error
        self.check()

    def _send(self, command: RankSpec | CountBlocks | Start) -> None:
        self.check()
        self.send_plan(msgspec.msgpack.encode(command))

    def _receive(self) -> list[int | None]:
        found = []
        for each in self._processes:
            message = next(messages(each.replies), None)
            if message is None:
                raise ExecutorError(self.watch.wait(1.0) or f"rank {each.rank} closed its socket")
            reply = decode_reply(message)
            if reply.error is not None:
                raise ConfigError(f"rank {each.rank}: {reply.error}")
            found.append(reply.value)
        return found


@contextmanager
def ended_on_error(ranks: Ranks | None) -> Iterator[None]:
    """End the ranks if the work fails."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _close(watch: Watch, files: tuple[int, int], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of rank 0 ends
    watch.close()
    for file in files:
        os.close(file)
