"""The main function of the ranks from 1 on: load a part of the model, then run plans.

    python -m headway.parallel.worker RANK PARENT SOCKET STORE MEMORY

PARENT is the process id of rank 0, the others are open files; ranks.py starts it. A rank exits when
rank 0 does: its socket closes, a collective fails, or its parent has another process id.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError
from headway.executor.base import Handle
from headway.parallel.channel import Channel
from headway.parallel.progress import Progress
from headway.parallel.spec import RankSpec, config_of

if TYPE_CHECKING:
    from headway.model.decoder import Decoder

BEAT_SECONDS = 0.05
MAX_IN_FLIGHT = 2  # plans that a GPU may have, as with async scheduling


class Worker:
    """One rank."""

    def __init__(self, rank: int, parent: int, control: int, store: int, memory: int) -> None:
        self.rank, self.parent = rank, parent
        self.control = socket.socket(fileno=control)
        self._store, self._memory = store, memory
        self._commands = self.control.makefile("rb")
        self.channel = Channel(memory, rank, rank + 1, 0)
        self.progress = Progress(self.channel.publish)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Advance this rank's counter, and exit with rank 0."""
        while os.getppid() == self.parent:
            self.channel.beat()
            time.sleep(BEAT_SECONDS)
        os._exit(1)

    def run(self) -> None:
        """Carry out commands until rank 0 starts to send plans, then plans until it is closed."""
        decoder = self._load()
        while (command := self._next_command()) is not None:
            if "count_blocks" in command:
                self._reply(self._count_blocks(decoder, command))
                continue
            self.channel = Channel(self._memory, self.rank, self.rank + 1, command["capacity"])
            self._run_plans(decoder, command)
            return

    def _next_command(self) -> dict[str, Any] | None:
        line = self._commands.readline()
        return json.loads(line) if line else None

    def _reply(self, value: object) -> None:
        self.control.sendall(json.dumps({"value": value}).encode() + b"\n")

    def _load(self) -> Decoder:
        """Load this rank's part of the model."""
        from headway.model.devices import use_device
        from headway.model.loader import load_decoder, open_checkpoint
        from headway.model.precision import choose_backend, kv_dtype_for, use_threads
        from headway.model.sharding import Shard
        from headway.parallel.group import connect

        command = self._next_command()
        if command is None:
            sys.exit()
        spec = RankSpec(**command["spec"])
        use_threads(spec.threads)
        device = use_device(spec.device(self.rank))
        group = connect(self._store, self.rank, spec.size, device, self.progress)
        checkpoint = open_checkpoint(Path(spec.path), spec.load_format, device)
        kv_dtype = kv_dtype_for(spec.kv_cache_dtype, device)
        backend = choose_backend(
            checkpoint.config, spec.precision, device, kv_dtype, spec.attention
        )
        shard = Shard(checkpoint.config, group, spec.is_exact)
        decoder = load_decoder(checkpoint, backend, device, shard=shard)
        self._reply(None)
        return decoder

    def _count_blocks(self, decoder: Decoder, command: dict[str, Any]) -> int:
        from headway.executor.factory import count_blocks

        return count_blocks(decoder, config_of(command["count_blocks"]), command["utilization"])

    def _run_plans(self, decoder: Decoder, command: dict[str, Any]) -> None:
        from headway.executor.factory import make_executor
        from headway.parallel.delta import PlanDecoder

        config = config_of(command["start"])
        executor = make_executor(decoder, config, enforce_eager=command["enforce_eager"])
        plans, flight = PlanDecoder(config.max_num_seqs), deque[Handle]()
        gc.freeze()
        gc.enable()
        self._reply(None)
        while self.control.recv(4096):
            while (message := self.channel.read()) is not None:
                self.progress.begin_plan()
                flight.append(executor.launch(plans.decode(message)))
                self.progress.end_plan()
                while len(flight) > MAX_IN_FLIGHT:
                    flight.popleft().wait()


def main() -> None:
    gc.disable()  # until plans run: modules and weights stay
    worker = Worker(*map(int, sys.argv[1:]))
    code = 1
    try:
        worker.run()
        code = 0
    except HeadwayError as error:
        worker.channel.report(str(error))
        with suppress(OSError):
            worker.control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
    except Exception as error:
        worker.channel.report(f"{type(error).__name__}: {error}")
    os._exit(code)  # waits for no thread, connection or device


if __name__ == "__main__":
    main()
