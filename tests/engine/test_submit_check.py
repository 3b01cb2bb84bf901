"""An engine refuses requests at which a step would fail, because that ends those of all callers."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from headway import LLM
from headway.engine import messages
from headway.engine.engine import Engine
from headway.engine.thread_client import ThreadClient
from headway.executor.simulated import Script
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.support.scripted import make_engine, script
from tests.support.waiting import on_loop, until


def sent(**fields: Any) -> messages.Submit:
    """A request whose fields have the right types."""
    params = {"max_tokens": 5, "ignore_eos": True} | fields.pop("params", {})
    sampling = fields.pop("sampling", {"temperature": 0.0})
    chosen = Sampling(**sampling) if isinstance(sampling, dict) else sampling
    return messages.Submit(
        **({"id": "r", "prompt": [5, 6, 7]} | fields),
        params=RequestParams(sampling=chosen, **params),
    )


WRONG = {
    "age": sent(age=-1.0), "endless age": sent(age=math.inf), "deadline": sent(deadline_in=math.nan),
    "negative token": sent(prompt=[-1]), "unknown token": sent(prompt=[1 << 20]),
    "no prompt": sent(prompt=[]), "unknown output": sent(outputs=((1 << 20,),)),
    "unknown prediction": sent(params={"prediction": array("i", [1, 1 << 20])}),
    "negative prediction": sent(params={"prediction": array("i", [-1])}),
    "outputs": sent(outputs=((1,), (2,))), "ended": sent(outputs=(None,)),
    "n": sent(params={"n": 0}), "many": sent(params={"n": 1 << 40}),
    "max_tokens": sent(params={"max_tokens": -1}), "salt": sent(params={"salt": "\x00"}),
    "priority": sent(params={"priority": (1 << 64) - 1}),
    "stop": sent(params={"stop_ids": frozenset({1 << 60})}),
    "script": sent(sampling=Script(num_output=-5, filler=1 << 40, end=0)),
    **{
        f"{name} {value!r}": sent(sampling={name: value})
        for name, values in {
            "temperature": (-1.0, math.nan, math.inf), "top_k": (-2,), "top_p": (0.0, math.nan),
            "min_p": (-0.1, math.nan), "repetition_penalty": (0.0, -1.0, math.inf),
            "frequency_penalty": (math.nan,), "presence_penalty": (1e9,),
            "logit_bias": ({1 << 20: 1.0}, {-1: 1.0}, {1: math.nan}), "logprobs": (-1, 101), "prompt_logprobs": (-1, 101),
            "bad_words": (((),), ((1 << 20,),), ((-1,),)),
            "allowed_tokens": (frozenset(), frozenset({1 << 20}), frozenset({-1})),
        }.items()
        for value in values
    },
}  # fmt: skip


@on_loop
async def test_a_request_at_which_a_step_would_fail_is_refused(tiny: str) -> None:
    with LLM(tiny, num_blocks=64, block_size=8, max_num_seqs=8, threads=1) as llm:
        await check_refused(llm.engine, sent(id="good", params={"max_tokens": 60}), WRONG)


@pytest.mark.parametrize("age", ["x", None, -1.0, math.nan, math.inf, 10**400, [], True])
def test_a_wrong_time_is_refused(age: Any) -> None:
    @on_loop
    async def run() -> None:
        params, wrong = script(20), {"age": {"age": age}, "deadline": {"deadline_in": age or "x"}}
        if age == -1.0:
            del wrong["deadline"]  # it has passed
        refused = {name: messages.Submit(name, [5], params, **each) for name, each in wrong.items()}
        await check_refused(make_engine(), messages.Submit("good", [5], params), refused)

    run()


async def check_refused(
    engine: Engine, good: messages.Submit, refused: dict[str, messages.Submit]
) -> None:
    """The good request runs to its end; each of the others gets an InvalidRequest."""
    client, received = ThreadClient(engine), list[messages.FromLoop]()
    await client.open(received.extend)
    client.send([good, *(replace(message, id=name) for name, message in refused.items())])
    await until(lambda: len(only(received)) == len(refused))
    assert only(received) == dict.fromkeys(refused, "InvalidRequest")
    await until(lambda: not engine.has_work)
    await until(lambda: [each for each in received if getattr(each, "end", None)])
    assert engine.fault is None and client.loop.ended is None
    await client.close()
    (end,) = [each.end for each in received if isinstance(each, messages.SampleUpdate) and each.end]
    assert end.reason in ("length", "stop")


def only(received: list[messages.FromLoop]) -> dict[str, str]:
    return {each.id: each.kind for each in received if isinstance(each, messages.Refusal)}
