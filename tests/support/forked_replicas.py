"""Replicas in processes of their own that start in milliseconds: forks of one that has the model.

It gets the names of replicas. Each new replica says its name, process id and port. All of them end
with the first process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from headway import LLM, Plan
from headway.engine.thread_client import ThreadClient
from headway.fleet.discovery import Announced
from headway.remote.auth import Identity
from headway.remote.service import EngineService
from tests.support.held import Held, Hold
from tests.support.processes import FORKS

KEY = b"key"
MODEL = Identity(name="", model="tiny", block_size=8)
SETTINGS: dict[str, Any] = {"num_blocks": 400, "block_size": 8, "max_num_seqs": 64, "threads": 1}
POISON = "poison"


class Poisoned(Held):
    """An executor that can be held. Decodes of the client POISON kill the process."""

    def launch(self, plan: Plan) -> Any:
        if any(request.params.client == POISON for request in plan.decodes):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan)


async def serve(llm: LLM, name: str, parent: int, hold: Hold, said: Connection) -> None:
    llm.engine.executor = Poisoned(llm.engine.executor, hold)
    client = ThreadClient(llm.engine, report_load=True)
    identity = Identity(name=name, model=MODEL.model, block_size=MODEL.block_size)
    address = await EngineService(client, identity, KEY).start(("127.0.0.1", 0))
    assert isinstance(address, tuple)
    said.send((name, os.getpid(), address[1]))  # in one piece
    while os.getppid() == parent:
        await asyncio.sleep(0.2)
    os._exit(0)


def main(model: str, hold: Hold, asked: Connection, said: Connection) -> None:
    llm, parent = LLM(model, **SETTINGS), os.getpid()
    with suppress(EOFError):
        while name := asked.recv():
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # those that were killed
                    pass
            if os.fork() == 0:
                asyncio.run(serve(llm, name, parent, hold, said))


@dataclass
class ForkedReplicas:
    """A directory of replicas that can be started and killed."""

    asked: Connection
    said: Connection
    hold: Hold
    found: dict[str, tuple[str, int]] = field(default_factory=dict)  # announced: host and port
    pids: dict[str, int] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        """Start and announce replicas, and wait for them."""
        for name in names:
            self.asked.send(name)
        for _ in names:
            name, pid, port = self.said.recv()
            self.found[name], self.pids[name] = ("127.0.0.1", port), pid

    def kill(self, name: str) -> None:
        os.kill(self.pids.pop(name), signal.SIGKILL)
        del self.found[name]

    def kill_all(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self.found.clear()

    def read(self) -> Announced:
        return Announced(replicas=dict(self.found))

    def forget(self, name: str) -> None:
        self.found.pop(name, None)


@contextmanager
def forked_replicas(model: str, hold: Hold) -> Iterator[ForkedReplicas]:
    """No replicas yet; at the end, all of them end."""
    (asked, ask), (answer, said) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=main, args=(model, hold, asked, said))
    process.start()
    for end in (asked, said):
        end.close()
    made = ForkedReplicas(ask, answer, hold)
    try:
        yield made
    finally:
        made.kill_all()
        ask.close()
        process.join()
        answer.close()
