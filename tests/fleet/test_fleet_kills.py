"""Replicas of a model are killed while 32 requests with every sampling feature run on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest

from headway import LLM, AsyncEngine, RequestOutput, SamplingParams
from headway.fleet import discovery
from headway.fleet.discovery import DiscoveredFleet
from headway.fleet.routing import round_robin
from headway.fleet.settings import FleetSettings
from tests.support.features import FEATURES, PROMPT
from tests.support.forked_replicas import (
    KEY,
    MODEL,
    POISON,
    SETTINGS,
    ForkedReplicas,
    forked_replicas,
)
from tests.support.held import Hold
from tests.support.waiting import LIMIT, until

NUM_KILLS, NUM_STREAMS = 10, 32
NUM_SEEN, NUM_HELD = 2, 6  # tokens of a request before the kill; less than the shortest output
CASES = FEATURES | {
    "long": {"seed": 4, "max_tokens": 90, "ignore_eos": True},
    "stop string": {"seed": 3, "max_tokens": 60, "stop": ["e"], "min_tokens": 9},
    "stop strings with n": {"seed": 3, "max_tokens": 60, "stop": ["the", "o"], "n": 3},
}


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def forks(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedReplicas]:
    hold = Hold(str(tmp_path_factory.mktemp("hold") / "hold"))
    with forked_replicas(llm.model_name, hold) as replicas:
        yield replicas


@pytest.fixture
def replicas(forks: ForkedReplicas, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedReplicas]:
    """None at first, and none is left for another test."""
    monkeypatch.setattr(discovery, "INTERVAL", 0.02)
    assert not forks.pids and not forks.found
    yield forks
    forks.kill_all()
    forks.hold.release()


def shown(output: RequestOutput) -> Any:
    """All that a caller sees of an output, without times."""
    return output.prompt_logprobs, output.outputs


class Gateway:
    """A gateway of the replicas, in this process."""

    def __init__(self, llm: LLM, replicas: ForkedReplicas) -> None:
        self.client = DiscoveredFleet(
            replicas, MODEL, KEY, route=round_robin,
            settings=FleetSettings(hang_seconds=LIMIT, stall_seconds=LIMIT),
        )  # fmt: skip
        self.engine = AsyncEngine(self.client, input_processor=llm.input_processor)
        self.counters = self.client.dispatcher.counters

    async def complete(self, id: str, params: SamplingParams) -> RequestOutput:
        return [output async for output in self.engine.generate(PROMPT, params, id)][-1]

    async def until_linked(self, number: int) -> None:
        await until(lambda: len(self.client.dispatcher.replicas) == number)

    def generates(self, name: str) -> bool:
        """Whether a replica has sent tokens of a request that is still open there."""
        return any(
            request.replica == name and request.num_tokens >= NUM_SEEN
            for request in self.client.dispatcher.requests.values()
        )

    async def round(self, number: int, replicas: ForkedReplicas) -> list[RequestOutput]:
        """The outputs of 32 requests; a replica is killed when they run."""
        params, victim = islice(cycle(CASES.values()), NUM_STREAMS), str(number)
        replicas.hold.set(NUM_HELD)
        runs = [
            asyncio.create_task(self.complete(f"{number}.{i}", SamplingParams(**each)))
            for i, each in enumerate(params)
        ]
        await until(lambda: self.generates(victim))
        replicas.kill(victim)
        replicas.hold.release()
        return await asyncio.wait_for(asyncio.gather(*runs), LIMIT)


def test_ten_kills_lose_and_change_no_token(llm: LLM, replicas: ForkedReplicas) -> None:
    alone = [
        shown(llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)[0])
        for fields in CASES.values()
    ]
    gateway = Gateway(llm, replicas)

    async def run() -> None:
        replicas.start("0", "1")
        await gateway.engine.start()
        for number in range(NUM_KILLS):
            await gateway.until_linked(2)
            moves = gateway.counters.num_moves
            found = await gateway.round(number, replicas)
            assert [shown(each) for each in found] == list(islice(cycle(alone), NUM_STREAMS))
            assert gateway.counters.num_moves > moves
            replicas.start(str(number + 2))
        await gateway.engine.close()

    asyncio.run(run())
    assert gateway.counters.num_losses == NUM_KILLS and gateway.counters.num_failed == 0


def test_a_request_that_kills_its_replica_ends_at_the_third_loss_and_alone(
    llm: LLM, replicas: ForkedReplicas
) -> None:
    gateway, fields = Gateway(llm, replicas), {"seed": 4, "max_tokens": 90, "ignore_eos": True}
    alone = shown(llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)[0])

    async def run() -> list[RequestOutput]:
        replicas.start("0", "1", "2", "3")
        await gateway.engine.start()
        await gateway.until_linked(4)
        clients = ("a", "b", "c", POISON)
        found = await asyncio.gather(
            *(gateway.complete(each, SamplingParams(**fields, client=each)) for each in clients)
        )
        left = gateway.client.dispatcher.replicas.keys()
        replicas.pids = {name: pid for name, pid in replicas.pids.items() if name in left}
        await gateway.engine.close()
        return found

    *others, poison = asyncio.run(asyncio.wait_for(run(), LIMIT))
    assert [shown(each) for each in others] == [alone] * 3
    (sample,) = poison.outputs
    assert sample.finish_reason == "error" and "3 replicas failed" in str(sample.error)
    assert gateway.counters.num_losses == 3 and gateway.counters.num_failed == 1
