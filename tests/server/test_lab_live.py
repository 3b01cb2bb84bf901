"""The live film of a server: its present state, every step, resets of the cache, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.engine.queries import ResetPrefixCache
from headway.engine.thread_client import ThreadClient
from headway.errors import ExecutorError
from headway.lab.film import live
from headway.lab.film.reader import Film
from headway.server import lab
from tests.support.film_states import shown, state_of
from tests.support.gated import Gate, gated_engine, scripted
from tests.support.waiting import LIMIT

Test = Callable[[AsyncEngine, Engine, Gate], Awaitable[None]]


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SECONDS", 0.005)
    monkeypatch.setattr(live, "MAX_SECONDS", 10 * LIMIT)  # no viewer is dropped


def served(test: Test) -> None:
    async def serve() -> None:
        engine, gate = gated_engine()
        client = ThreadClient(engine)
        live.install(client.loop)
        running = AsyncEngine(client)
        await running.start()
        try:
            await asyncio.wait_for(test(running, engine, gate), LIMIT)
        finally:
            await running.close()

    asyncio.run(serve())


async def run(engine: AsyncEngine, id: str, num_output: int = 5) -> None:
    async for _ in engine.stream(id, range(9), scripted(num_output)):
        pass


async def read_until(
    film: Film, pieces: AsyncIterator[bytes], is_shown: Callable[[Film], bool]
) -> None:
    """Read until the last frame shows something."""
    rest = b""
    async for piece in pieces:
        rest += piece
        rest = rest[film.read(rest) :]
        if film.num_frames and is_shown(film):
            return


def last_state(film: Film) -> dict[str, object]:
    ids = [request[0] for request in film.requests]
    return shown(film.state(film.num_frames - 1), ids)


def is_settled(film: Film) -> bool:
    """An idle server shows that its requests have ended."""
    state = last_state(film)
    return bool(state["cached"]) and not state["requests"]


def test_a_film_shows_finished_requests_and_a_reset_of_the_cache_at_once() -> None:
    async def test(running: AsyncEngine, engine: Engine, gate: Gate) -> None:
        await run(running, "before")
        film = Film()
        async with aclosing(lab.live_film(running)) as pieces:
            film.read(await anext(pieces))  # the film starts here
            await run(running, "a")
            await read_until(film, pieces, is_settled)
            assert last_state(film)["cached"]
            assert await running.ask(ResetPrefixCache())
            await read_until(film, pieces, lambda film: not last_state(film)["cached"])
            text = [text for frame in range(film.num_frames) for *_, text in film.texts(frame)]
            assert any("prefix cache is reset" in each for each in text)
            await run(running, "b")
            await read_until(film, pieces, is_settled)
            assert last_state(film)["cached"] == state_of(engine.scheduler)["cached"] != set()
        assert film.column("free", film.num_frames - 1) > 0
        assert not engine.observers[1:]  # the film has ended: no step is described any more

    served(test)


def test_a_film_shows_the_state_after_a_failed_step() -> None:
    async def test(running: AsyncEngine, engine: Engine, gate: Gate) -> None:
        film = Film()
        async with aclosing(lab.live_film(running)) as pieces:
            film.read(await anext(pieces))  # the film starts here
            await run(running, "a")
            gate.num_faults = 1
            await run(running, "b")
            await read_until(film, pieces, lambda film: "b" in {r[0] for r in film.requests})
            state = last_state(film)
            assert (
                state["requests"] == {}
                and state["cached"] == set() == state_of(engine.scheduler)["cached"]
            )

    served(test)


def test_only_a_few_pages_can_follow_a_server() -> None:
    async def test(running: AsyncEngine, engine: Engine, gate: Gate) -> None:
        films = [lab.live_film(running) for _ in range(live.MAX_VIEWERS + 1)]
        for film in films[:-1]:
            await anext(film)
        with pytest.raises(ExecutorError, match=f"limit {live.MAX_VIEWERS}"):
            await anext(films[-1])
        await films[0].aclose()
        late = lab.live_film(running)
        await anext(late)
        for film in (*films[1:], late):
            await film.aclose()

    served(test)
