"""A replica in its own process: an engine without a model behind a Unix socket."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headway.engine.thread_client import ThreadClient
from headway.remote.service import EngineService
from tests.support.held import Held, Hold
from tests.support.scripted import make_engine


async def main(path: str, hold: str) -> None:
    engine = make_engine(0.02)
    engine.executor = Held(engine.executor, Hold(hold))
    client = ThreadClient(engine, report_load=True)
    await EngineService(client).start(Path(path))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
