"""Replicas of a model are killed while 32 requests with every sampling feature run on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import pytest

from headway import LLM
from headway.engine.async_engine import AsyncEngine
from headway.engine.outputs import RequestOutput
from headway.fleet.client import FleetClient
from headway.fleet.routing import round_robin
from headway.fleet.transport import discovery
from headway.fleet.transport.discovery import DiscoveredFleet
from headway.sampling_params import SamplingParams
from tests.support import real
from tests.support.features import FEATURES, PROMPT
from tests.support.forked_replicas import (
    KEY,
    MODEL,
    POISON,
    SETTINGS,
    ForkedReplicas,
    forked_replicas,
)
from tests.support.waiting import until

NUM_KILLS, NUM_STREAMS = 10, 32
CASES = FEATURES | {
    "long": {"seed": 4, "max_tokens": 90, "ignore_eos": True},
    "stop string": {"seed": 3, "max_tokens": 60, "stop": ["e"], "min_tokens": 9},
    "stop strings with n": {"seed": 3, "max_tokens": 60, "stop": ["the", "o"], "n": 3},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(real.write_tiny(tmp_path_factory.mktemp("tiny"))), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def replicas(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedReplicas]:
    monkeypatch.setattr(discovery, "INTERVAL", 0.02)
    with forked_replicas(llm.model_name) as replicas:
        yield replicas


def shown(output: RequestOutput) -> Any:
    """All that a caller sees of an output, without times."""
    return output.prompt_logprobs, output.outputs


class Gateway:
    """A gateway of the replicas, in this process."""

    def __init__(self, llm: LLM, replicas: ForkedReplicas) -> None:
        self.client = FleetClient(block_size=MODEL.block_size, route=round_robin)
        fleet = DiscoveredFleet(self.client, replicas, MODEL, KEY)
        self.engine = AsyncEngine(fleet, input_processor=llm.input_processor)
        self.counters = self.client.dispatcher.counters
        self.on_output: Callable[[], None] = lambda: None
        self.longest_pause = 0.0  # seconds

    async def complete(self, id: str, params: SamplingParams) -> RequestOutput:
        outputs, latest = list[RequestOutput](), time.perf_counter()
        async for output in self.engine.generate(PROMPT, params, id):
            outputs.append(output)
            now = time.perf_counter()
            self.longest_pause, latest = max(self.longest_pause, now - latest), now
            self.on_output()
        return outputs[-1]

    async def until_linked(self, number: int) -> None:
        await until(lambda: len(self.client.dispatcher.replicas) == number)

    async def round(self, number: int, kill: Callable[[], None]) -> list[RequestOutput]:
        """The outputs of 32 requests; `kill` is called when they run."""
        counts = count()
        self.on_output = lambda: kill() if next(counts) == 20 else None
        params = islice(cycle(CASES.values()), NUM_STREAMS)
        return await asyncio.gather(
            *(
                self.complete(f"{number}.{i}", SamplingParams(**each))
                for i, each in enumerate(params)
            )
        )


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
            found = await gateway.round(number, partial(replicas.kill, str(number)))
            assert [shown(each) for each in found] == list(islice(cycle(alone), NUM_STREAMS))
            assert gateway.counters.num_moves > moves, "the replica was killed too late"
            replicas.start(str(number + 2))
        await gateway.engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert gateway.counters.num_deaths == NUM_KILLS and gateway.counters.num_failed == 0
    assert gateway.longest_pause < 2.0, "1 s, and the prefill elsewhere"


def test_a_request_that_kills_its_replica_ends_at_the_second_death_and_alone(
    llm: LLM, replicas: ForkedReplicas
) -> None:
    gateway, fields = Gateway(llm, replicas), {"seed": 4, "max_tokens": 90, "ignore_eos": True}
    alone = shown(llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)[0])

    async def run() -> list[RequestOutput]:
        replicas.start("0", "1", "2")
        await gateway.engine.start()
        clients = ("a", "b", "c", POISON)
        found = await asyncio.gather(
            *(gateway.complete(each, SamplingParams(**fields, client=each)) for each in clients)
        )
        replicas.pids = {name: replicas.pids[name] for name in gateway.client.dispatcher.replicas}
        await gateway.engine.close()
        return found

    *others, poison = asyncio.run(asyncio.wait_for(run(), 30))
    assert [shown(each) for each in others] == [alone] * 3
    (sample,) = poison.outputs
    assert sample.finish_reason == "error" and "failed 2 times (limit 2" in str(sample.error)
    assert gateway.counters.num_deaths == 2 and gateway.counters.num_failed == 1
