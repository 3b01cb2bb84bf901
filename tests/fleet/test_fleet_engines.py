"""A fleet of real engines: texts do not depend on replicas that die, hang or are drained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway import LLM, RequestOutput, SamplingParams
from headway.engine.async_engine import AsyncEngine
from headway.engine.thread_client import ThreadClient
from headway.fleet.client import FleetClient
from headway.fleet.settings import FleetSettings
from tests.support.faults import Faults
from tests.support.features import FEATURES, PROMPT
from tests.support.waiting import LIMIT, wait_until

CASES = FEATURES | {
    "stop string": {"seed": 3, "max_tokens": 60, "stop": ["e"], "min_tokens": 9},
    "stop strings with n": {"seed": 3, "max_tokens": 60, "stop": ["the", "o"], "n": 3},
}
# On a GPU the bits of a token depend on its batch otherwise.
EXACT: dict[str, Any] = {"deterministic": True} if torch.cuda.is_available() else {}


@pytest.fixture(scope="module")
def alone(tiny: str) -> Iterator[dict[str, RequestOutput]]:
    """Every case by itself, on one engine."""
    with LLM(tiny, num_blocks=200, **EXACT) as llm:
        yield {
            name: llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)[0]
            for name, fields in CASES.items()
        }


def shown(output: RequestOutput) -> Any:
    """All that a caller sees of an output, without times."""
    return output.prompt_logprobs, output.outputs


async def run_cases(fleet: FleetClient, llm: LLM) -> dict[str, RequestOutput]:
    engine = AsyncEngine(fleet, input_processor=llm.input_processor)
    await engine.start()

    async def one(name: str) -> RequestOutput:
        outputs = engine.generate(PROMPT, SamplingParams(**CASES[name]), name)
        return [output async for output in outputs][-1]

    try:
        async with asyncio.timeout(LIMIT):
            outputs = await asyncio.gather(*map(one, CASES))
    finally:
        await engine.close()
    return dict(zip(CASES, outputs, strict=True))


def test_texts_survive_a_lost_replica_and_a_drain(
    tiny: str, alone: dict[str, RequestOutput]
) -> None:
    """A is lost in the middle, B is drained later, and C, which joined last, ends what is left."""
    settings: dict[str, Any] = {"block_size": 8, "num_blocks": 60, **EXACT}
    llms = [LLM(tiny, max_num_seqs=n, **settings) for n in (3, 4, 6)]
    clients = [ThreadClient(llm.engine, report_load=True) for llm in llms]
    Faults(llms[0].engine).dies_at = 7
    second, drained = Faults(llms[1].engine), list[asyncio.Task[None]]()
    fleet = FleetClient(
        dict(zip("ab", clients, strict=False)),
        block_size=8,
        settings=FleetSettings(hang_seconds=LIMIT, stall_seconds=LIMIT),
    )
    counters = fleet.dispatcher.counters

    async def drain() -> None:
        await fleet.add("c", clients[2])
        await fleet.drain("b")

    async def run() -> dict[str, RequestOutput]:
        loop = asyncio.get_running_loop()

        def start() -> None:
            loop.call_soon_threadsafe(lambda: drained.append(loop.create_task(drain())))
            wait_until(lambda: counters.num_drains)

        second.calls[12] = start
        found = await run_cases(fleet, llms[0])
        await asyncio.gather(*drained)
        return found

    found = asyncio.run(run())
    assert {name: shown(output) for name, output in found.items()} == {
        name: shown(output) for name, output in alone.items()
    }
    assert counters.num_losses == 1 and counters.num_drains == 1 and counters.num_failed == 0
    assert counters.num_moves > 5 and counters.num_resumed_tokens > 20
