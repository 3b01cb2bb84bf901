"""The main function of the ranks from 1 on: load a part of the model, then run plans.

    python -m headway.parallel.worker PARENT [RANK SOCKET STORE MEMORY]

PARENT is a process id, the last three are open files; launch.py starts it. Without a rank, standard
input has an invitation of rank 0 on another machine. A rank exits when rank 0 does: its connection
closes, a collective fails, or its parent has another process id.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from headway import __version__
from headway.config import Config
from headway.errors import ConfigError, HeadwayError
from headway.executor.base import Handle
from headway.executor.factory import count_blocks, make_executor
from headway.parallel.delta import PlanDecoder
from headway.parallel.launch import Invitation
from headway.parallel.link import LocalLink, RemoteLink
from headway.parallel.progress import Progress
from headway.parallel.spec import CountBlocks, RankSpec, Reply, config_of, decode_command

if TYPE_CHECKING:
    from headway.model.decoder import Decoder

BEAT_SECONDS = 0.05
decode_invitation = msgspec.msgpack.Decoder(Invitation).decode
MAX_IN_FLIGHT = 2  # plans that a GPU may have, as with async scheduling


class Worker:
    def __init__(self, link: LocalLink | RemoteLink, parent: int) -> None:
        self.link, self.parent = link, parent
        self.progress = Progress(link.publish)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Advance this rank's counter, and exit with rank 0."""
        with suppress(OSError):  # the connection is lost
            while os.getppid() == self.parent:
                self.link.beat()
                time.sleep(BEAT_SECONDS)
        os._exit(1)

    def run(self) -> None:
        """Carry out commands until rank 0 starts to send plans, then plans until it is closed."""
        decoder: Decoder | None = None
        for message in self.link.messages:
            command = decode_command(message)
            if isinstance(command, RankSpec):
                decoder = self._load(command)
                self.link.send(Reply())
                continue
            assert decoder is not None, "the first command is to load"
            config = config_of(command.sizes)
            if isinstance(command, CountBlocks):
                self.link.send(Reply(count_blocks(decoder, config, command.utilization)))
            else:
                self._run_plans(decoder, config, enforce_eager=command.enforce_eager)

    def _load(self, spec: RankSpec) -> Decoder:
        from headway.model.devices import use_device
        from headway.model.loader import load_decoder, open_checkpoint
        from headway.model.precision import choose_backend, kv_dtype_for, use_threads
        from headway.model.registry import resolve
        from headway.model.sharding import Shard
        from headway.parallel.group import connect

        if spec.version != __version__:
            raise ConfigError(f"it has Headway {__version__}, rank 0 has {spec.version}")
        use_threads(spec.threads)
        device, link = use_device(spec.device(self.link.rank)), self.link
        group = connect(link.store, link.rank, spec.size, device, self.progress, link.host)
        checkpoint = open_checkpoint(resolve(spec.path), spec.load_format, device)
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
        self.link.send(Reply())
        for message in self.link.messages:
            self.progress.begin_plan()
            flight.append(executor.launch(plans.decode(message)))
            self.progress.end_plan()
            while len(flight) > MAX_IN_FLIGHT:
                flight.popleft().wait()


def main() -> None:
    gc.disable()  # until plans run: modules and weights stay
    parent, *files = map(int, sys.argv[1:])
    link = LocalLink(*files) if files else RemoteLink(decode_invitation(sys.stdin.buffer.read()))
    worker, code = Worker(link, parent), 1
    try:
        worker.run()
        code = 0
    except HeadwayError as error:
        link.report(str(error))
        with suppress(OSError):
            link.send(Reply(error=str(error)))
    except Exception as error:
        link.report(f"{type(error).__name__}: {error}")
    os._exit(code)  # waits for no thread, connection or device


if __name__ == "__main__":
    main()
