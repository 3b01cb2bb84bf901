"""A gateway is lost; another one continues its requests, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headway.engine.async_engine import RequestStream
from headway.engine.messages import Resume, SampleUpdate, Submit
from headway.engine.queries import FindRequest
from headway.errors import NotResumable
from headway.fleet.discovery import DiscoveredFleet
from headway.remote.service import EngineService
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.fleet.test_discovery import Listed, gateway, quick, start
from tests.support.scripted_fleet import World
from tests.support.served import Capitals
from tests.support.waiting import on_loop, until

__all__ = ["quick"]
TEXT = b"a text of some length"
KINDS = {
    "plain": RequestParams(max_tokens=len(TEXT), ignore_eos=True),
    "samples": RequestParams(max_tokens=len(TEXT), ignore_eos=True, n=2),
    "scored": RequestParams(
        max_tokens=len(TEXT), ignore_eos=True, reads_cache=False,
        sampling=Sampling(logprobs=1, prompt_logprobs=0),
    ),
}  # fmt: skip


class Caller:
    """What the caller of a gateway gets of one request."""

    def __init__(self, params: RequestParams) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.num_scores = 0
        self.scored: set[int] = set()
        self.num_ends = 0

    def add(self, updates: list[SampleUpdate]) -> None:
        for update in updates:
            self.tokens[update.sample] += update.tokens
            self.num_scores += len(update.logprobs or ())
            self.scored.update(place for place, _ in update.prompt_logprobs or ())
            self.num_ends += update.end is not None


async def read(stream: RequestStream, caller: Caller, num_tokens: int = 1 << 20) -> None:
    while stream.num_open and len(caller.tokens[0]) < num_tokens:
        caller.add(await stream.take())


def kill(fleet: DiscoveredFleet) -> None:
    """End a gateway's connections as if its process were killed."""
    for task in fleet._watching:
        task.cancel()
    for replica in [*fleet.dispatcher.replicas.values()]:
        replica.is_gone = True
        replica.client._writer.transport.abort()  # type: ignore[attr-defined]


def open_on(services: dict[str, EngineService]) -> Iterator[str]:
    return (name for name, each in services.items() if each.num_open)


async def stop(services: dict[str, EngineService], executors: dict[str, Capitals]) -> None:
    for name, each in services.items():
        executors[name].gate.set()
        await each.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_another_gateway_continues_with_every_token(
    kind: str, is_moved: bool, is_lost: bool
) -> None:
    """The request may have moved before, and its replica may be lost after."""

    @on_loop
    async def run() -> None:
        params, directory = KINDS[kind], Listed()
        executors = {name: Capitals() for name in "abc"}
        services = {name: await start(name, directory, executors[name]) for name in "abc"}
        for executor in executors.values():
            executor.num_free_steps = 4
        stack = ExitStack()
        async with gateway(directory) as (first, fleet), gateway(directory) as (second, other):
            stream = stack.enter_context(first.submitted("r", list(TEXT), params))
            caller = Caller(params)
            await read(stream, caller, 2)
            (where,) = open_on(services)
            if is_moved:
                await until(lambda: executors[where].is_blocked)
                fleet.dispatcher.drain(fleet.dispatcher.replicas[where])
                fleet._send_and_deliver()
                await read(stream, caller, len(caller.tokens[0]) + 2)
                where = str(fleet.dispatcher.requests["r"].replica)
            await until(lambda: executors[where].is_blocked)
            kill(fleet)
            held = await second.ask(FindRequest("r"))
            assert held == (where, "r~1" if is_moved else "r")
            again = Caller(params)
            with second.submitted("r", list(TEXT), params, held=held) as stream:
                await read(stream, again, 2)
                assert again.tokens[0][: len(caller.tokens[0])] == caller.tokens[0]
                if is_lost:
                    other.dispatcher.lose(other.dispatcher.replicas[where], "it was lost")
                for executor in executors.values():
                    executor.num_free_steps = None
                    executor.gate.set()
                await read(stream, again)
            first.stop_reason = "killed"
            stack.close()
        wanted = [TEXT.upper(), TEXT[1:].upper()][: params.n]
        for tokens, text in zip(again.tokens, wanted, strict=True):
            assert bytes(tokens[: len(text)]) == text
        assert again.num_ends == params.n and not other.dispatcher.requests
        if kind == "scored":
            assert again.num_scores == len(TEXT) and again.scored == set(range(1, len(TEXT)))
        await stop(services, executors)

    run()


@on_loop
async def test_an_unknown_request_is_not_found_and_a_lost_one_is_refused() -> None:
    directory = Listed()
    service = await start("a", directory)
    async with gateway(directory) as (engine, _):
        assert await engine.ask(FindRequest("r")) is None
        for held in (("a", "r"), ("gone", "r")):
            with (
                engine.submitted("r", list(TEXT), KINDS["plain"], held=held) as stream,
                pytest.raises(NotResumable, match="r"),
            ):
                await stream.take()
    await service.close()


def test_a_request_whose_replica_is_lost_before_it_answers_is_refused() -> None:
    """Another replica would begin anew, with other tokens than the client has."""
    world = World()
    world.add("a")
    world.add("b")
    world.tokens["r"], world.ends["r"] = [[]], {}
    world.fleet.resume(Resume(Submit("r", [5, 6], RequestParams(max_tokens=4)), "r", "a"))
    world.fleet.lose(world.fleet.replicas["a"], "it was lost")
    world.step()
    assert world.refused["r"].kind == "NotResumable" and not world.fleet.requests
