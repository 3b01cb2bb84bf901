"""The live film of a server: its present state, every step, resets of the cache, and failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from headway.engine.async_engine import AsyncEngine, ThreadClient
from headway.engine.engine import Engine
from headway.engine.queries import ResetPrefixCache
from headway.errors import ExecutorError
from headway.lab.film import live
from headway.lab.film.reader import Film
from headway.server import lab
from tests.support.film_states import shown, state_of
from tests.support.gated import Gate, gated_engine, scripted
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


@on_loop
async def test_a_film_shows_finished_requests_and_a_reset_of_the_cache_at_once() -> None:
    async with served() as (running, engine, _gate):
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


@on_loop
async def test_a_film_shows_the_state_after_a_failed_step() -> None:
    async with served() as (running, engine, gate):
        film = Film()
        async with aclosing(lab.live_film(running)) as pieces:
            film.read(await anext(pieces))  # the film starts here
            await run(running, "a")
            gate.num_faults = 1
            await run(running, "b")
            await read_until(film, pieces, lambda film: "b" in {r[0] for r in film.requests})
            state = last_state(film)
            assert state["requests"] == {}
            assert state["cached"] == set() == state_of(engine.scheduler)["cached"]


@on_loop
async def test_only_a_few_pages_can_follow_a_server() -> None:
    async with served() as (running, _engine, _gate):
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
