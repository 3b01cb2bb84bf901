"""Starts the other ranks of a tensor-parallel group and sends them commands and plans.

Rank 0 is this process. The others are children that are started with an interpreter of their own.
They get JSON commands through a socket while the model is loaded, then plans through shared memory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from headway.config import Config
from headway.errors import ConfigError, ExecutorError
from headway.model.config import ModelConfig
from headway.model.sharding import Shard
from headway.parallel.channel import Channel, anonymous_file
from headway.parallel.delta import largest_delta
from headway.parallel.group import Group, connect
from headway.parallel.progress import Progress
from headway.parallel.spec import RankSpec, config_sizes
from headway.parallel.watch import INTERVAL, RankProcess, Watch

ROOT = Path(__file__).parents[2]  # of this package, which may be in the working directory
MIN_CAPACITY = 1 << 20  # bytes of shared memory for plans
EXPLAIN_SECONDS = 0.5  # how long an error of a collective waits for its cause


class Ranks:
    """The ranks from 1 on. ExecutorError from every method once one of them has ended."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self._files = anonymous_file(), anonymous_file()  # to connect; shared memory
        channel = Channel(self._files[1], 0, spec.size, 0)
        processes = [self._start(rank) for rank in range(1, spec.size)]
        self.channel, self._processes = channel, processes
        self.progress = Progress()
        self.watch = Watch(processes, channel, self.progress)
        self.close = finalize(self, _close, self.watch, self._files, os.getpid())
        self._send({"spec": asdict(spec)})

    def _start(self, rank: int) -> RankProcess:
        own, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        files = (theirs.fileno(), *self._files)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.parallel.worker",
                 *map(str, (rank, os.getpid(), *files))],
                stdin=subprocess.DEVNULL, pass_fds=files,
                start_new_session=True,  # signals of the terminal are for rank 0
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.spec.threads)},
            )  # fmt: skip
        return RankProcess(rank, process, own, own.makefile("rb"))

    def connect(self, model: ModelConfig) -> Shard:
        """Connect the ranks; returns rank 0's part of the model."""
        found: list[Group | Exception] = []
        device = torch.device(self.spec.device(0))

        def join() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # of this thread
                found.append(connect(self._files[0], 0, self.spec.size, device, self.progress))
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
        self._send({"count_blocks": config_sizes(config), "utilization": utilization})
        with self.guard():
            fitting = own()
        smallest: int = min([fitting, *self._receive()])
        return smallest

    def start(self, config: Config, make_own: Callable[[], Any], *, enforce_eager: bool) -> Any:
        """Create the executors of all ranks; returns that of rank 0. Plans can be sent then."""
        capacity = 2 * largest_delta(config) + MIN_CAPACITY
        self.channel = self.watch.channel = Channel(self._files[1], 0, self.spec.size, capacity)
        self._send({
            "start": config_sizes(config), "capacity": capacity, "enforce_eager": enforce_eager,
        })  # fmt: skip
        with self.guard():
            own = make_own()
        self._receive()
        self.watch.is_loading = False
        return own

    def send_plan(self, message: bytes) -> None:
        """Send an encoded plan to all ranks."""
        self.channel.write(message, self.check)
        for each in self._processes:
            with suppress(BlockingIOError, BrokenPipeError):  # it is awake, or the watch sees it
                each.control.send(b"\0", socket.MSG_DONTWAIT)

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

    def _send(self, command: dict[str, Any]) -> None:
        self.check()
        for each in self._processes:
            with suppress(BrokenPipeError):  # found by `_receive`
                each.control.sendall(json.dumps(command).encode() + b"\n")

    def _receive(self) -> list[Any]:
        """One reply of each rank."""
        found = []
        for each in self._processes:
            line = each.replies.readline()
            if not line:
                raise ExecutorError(self.watch.wait(1.0) or f"rank {each.rank} closed its socket")
            reply = json.loads(line)
            if "error" in reply:
                raise ConfigError(f"rank {each.rank}: {reply['error']}")
            found.append(reply["value"])
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
