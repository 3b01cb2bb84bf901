"""A replica in its own process: an engine without a model behind a Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headway.engine.thread_client import ThreadClient
from headway.remote.service import EngineService
from tests.support.held import Held, Hold
from tests.support.processes import Forked
from tests.support.scripted import make_engine


def replica(path: Path, hold: Hold) -> Forked:
    """Start one; it is ready."""
    process = Forked(_serve, path, hold)
    assert process.stdout.readline() == "ready\n"
    return process


def _serve(path: Path, hold: Hold) -> None:
    asyncio.run(_run(path, hold))


async def _run(path: Path, hold: Hold) -> None:
    engine = make_engine(0.02)
    engine.executor = Held(engine.executor, hold)
    client = ThreadClient(engine, report_load=True)
    await EngineService(client).start(path)
    print("ready", flush=True)
    await asyncio.Event().wait()
