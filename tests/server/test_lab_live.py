"""The live recording of a server: its present state, every step, resets of the cache, and failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.engine.queries import ResetPrefixCache
from headway.engine.thread_client import ThreadClient
from headway.errors import ExecutorError
from headway.lab.recording import live
from headway.lab.recording.reader import RunRecording
from headway.server import lab
from tests.support.gated import Gate, gated_engine, scripted
from tests.support.recorded_states import shown, state_of
from tests.support.waiting import LIMIT, on_loop


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SECONDS", 0.005)
    monkeypatch.setattr(live, "MAX_SECONDS", 10 * LIMIT)  # no viewer is dropped


@asynccontextmanager
async def served() -> AsyncIterator[tuple[AsyncEngine, Engine, Gate]]:
    engine, gate = gated_engine()
    client = ThreadClient(engine)
    live.install(client.loop)
    running = AsyncEngine(client)
    await running.start()
    try:
        yield running, engine, gate
    finally:
        await running.close()


async def run(engine: AsyncEngine, id: str, num_output: int = 5) -> None:
    async for _ in engine.stream(id, range(9), scripted(num_output)):
        pass


async def read_until(
    recording: RunRecording, pieces: AsyncIterator[bytes], is_shown: Callable[[RunRecording], bool]
) -> None:
    """Read until the last frame shows something."""
    rest = b""
    async for piece in pieces:
        rest += piece
        rest = rest[recording.read(rest) :]
        if recording.num_frames and is_shown(recording):
            return


def last_state(recording: RunRecording) -> dict[str, object]:
    ids = [request[0] for request in recording.requests]
    return shown(recording.state(recording.num_frames - 1), ids)


def is_settled(recording: RunRecording) -> bool:
    """An idle server shows that its requests have ended."""
    state = last_state(recording)
    return bool(state["cached"]) and not state["requests"]


@on_loop
async def test_a_recording_shows_finished_requests_and_a_reset_of_the_cache_at_once() -> None:
    async with served() as (running, engine, _gate):
        await run(running, "before")
        recording = RunRecording()
        async with aclosing(lab.live_recording(running)) as pieces:
            recording.read(await anext(pieces))  # the recording starts here
            await run(running, "a")
            await read_until(recording, pieces, is_settled)
            assert last_state(recording)["cached"]
            assert await running.ask(ResetPrefixCache())
            await read_until(
                recording, pieces, lambda recording: not last_state(recording)["cached"]
            )
            text = [
                text for frame in range(recording.num_frames) for *_, text in recording.texts(frame)
            ]
            assert any("prefix cache is reset" in each for each in text)
            await run(running, "b")
            await read_until(recording, pieces, is_settled)
            assert last_state(recording)["cached"] == state_of(engine.scheduler)["cached"] != set()
        assert recording.column("free", recording.num_frames - 1) > 0
        assert not engine.observers[1:]  # the recording has ended: no step is described any more


@on_loop
async def test_a_recording_shows_the_state_after_a_failed_step() -> None:
    async with served() as (running, engine, gate):
        recording = RunRecording()
        async with aclosing(lab.live_recording(running)) as pieces:
            recording.read(await anext(pieces))  # the recording starts here
            await run(running, "a")
            gate.num_faults = 1
            await run(running, "b")
            await read_until(
                recording, pieces, lambda recording: "b" in {r[0] for r in recording.requests}
            )
            state = last_state(recording)
            assert state["requests"] == {}
            assert state["cached"] == set() == state_of(engine.scheduler)["cached"]


@on_loop
async def test_only_a_few_pages_can_follow_a_server() -> None:
    async with served() as (running, _engine, _gate):
        recordings = [lab.live_recording(running) for _ in range(live.MAX_VIEWERS + 1)]
        for recording in recordings[:-1]:
            await anext(recording)
        with pytest.raises(ExecutorError, match=f"limit {live.MAX_VIEWERS}"):
            await anext(recordings[-1])
        await recordings[0].aclose()
        late = lab.live_recording(running)
        await anext(late)
        for recording in (*recordings[1:], late):
            await recording.aclose()
