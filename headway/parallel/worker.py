"""The main function of the ranks from 1 on: load a part of the model, then run plans.

    python -m headway.parallel.worker RANK PARENT SOCKET STORE MEMORY

PARENT is the process id of rank 0, the others are open files; ranks.py starts it. A rank exits when
rank 0 does: its socket closes, a collective fails, or its parent has another process id.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.config import Config
from headway.errors import HeadwayError
from headway.executor.base import Handle
from headway.executor.factory import count_blocks, make_executor
from headway.parallel.delta import PlanDecoder
from headway.parallel.progress import Progress, SharedState
from headway.parallel.spec import (
    CountBlocks,
    RankSpec,
    Reply,
    config_of,
    decode_command,
    framed,
    messages,
)

if TYPE_CHECKING:
    from headway.model.decoder import Decoder

BEAT_SECONDS = 0.05
MAX_IN_FLIGHT = 2  # plans that a GPU may have, as with async scheduling


class Worker:
    def __init__(self, rank: int, parent: int, control: int, store: int, memory: int) -> None:
        self.rank, self.parent = rank, parent
        self.control = socket.socket(fileno=control)
        self._store = store
        self._messages = messages(self.control.makefile("rb"))
        self.shared = SharedState(memory, rank)
        self.progress = Progress(self.shared.publish)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Advance this rank's counter, and exit with rank 0."""
        while os.getppid() == self.parent:
            self.shared.beat()
            time.sleep(BEAT_SECONDS)
        os._exit(1)

    def run(self) -> None:
        """Carry out commands until rank 0 starts to send plans, then plans until it is closed."""
        decoder: Decoder | None = None
        for message in self._messages:
            command = decode_command(message)
            if isinstance(command, RankSpec):
                decoder = self._load(command)
                self.reply(Reply())
                continue
            assert decoder is not None, "the first command is to load"
            config = config_of(command.sizes)
            if isinstance(command, CountBlocks):
                self.reply(Reply(count_blocks(decoder, config, command.utilization)))
            else:
                self._run_plans(decoder, config, enforce_eager=command.enforce_eager)

    def reply(self, reply: Reply) -> None:
        self.control.sendall(framed(msgspec.msgpack.encode(reply)))

    def _load(self, spec: RankSpec) -> Decoder:
        from headway.model.devices import use_device
        from headway.model.loader import load_decoder, open_checkpoint
        from headway.model.precision import choose_backend, kv_dtype_for, use_threads
        from headway.model.sharding import Shard
        from headway.parallel.group import connect

        use_threads(spec.threads)
        device = use_device(spec.device(self.rank))
        group = connect(self._store, self.rank, spec.size, device, self.progress)
        checkpoint = open_checkpoint(Path(spec.path), spec.load_format, device)
        kv_dtype = kv_dtype_for(spec.kv_cache_dtype, device)
        backend = choose_backend(
            checkpoint.config, spec.precision, device, kv_dtype, spec.attention
        )
        shard = Shard(checkpoint.config, group, spec.is_exact)
        return load_decoder(checkpoint, backend, device, shard=shard)

    def _run_plans(self, decoder: Decoder, config: Config, *, enforce_eager: bool) -> None:
        executor = make_executor(decoder, config, enforce_eager=enforce_eager)
        plans, flight = PlanDecoder(config.max_num_seqs), deque[Handle]()
        gc.freeze()
        gc.enable()
        self.reply(Reply())
        for message in self._messages:
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
        worker.shared.report(str(error))
        with suppress(OSError):
            worker.reply(Reply(error=str(error)))
    except Exception as error:
        worker.shared.report(f"{type(error).__name__}: {error}")
    os._exit(code)  # waits for no thread, connection or device


if __name__ == "__main__":
    main()
