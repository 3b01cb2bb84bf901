"""Routing rules on eight simulated replicas, and the time of one decision.

    python -m bench.fleet.routing mooncake_conversation_first4000.jsonl

Workloads: a Mooncake trace; `hot`: 64 prefixes with a Zipf distribution, so that the first one has
more requests than one replica can serve; `unshared`: no two prompts share a block. Each runs under
all rules, and under an oracle that sends a request to the longest cached prefix whatever the load.

hits           share of prompt tokens found in a cache, and as a share of the oracle's
balance        largest busy time and largest number of computed tokens of a replica, by the mean
decision_us    one decision for an 8,192-token prompt, of which all of 8, 256 or 1,024 full pools hold
               the same part, or one in 8 all of it, or each one of 16 parts;
               submit: all that the gateway does with a request, from a list of tokens to a message
index          the router's index of 64 full pools
Prints one JSON object. Times of requests are simulated seconds; decision_us is measured here.
"""

from __future__ import annotations

import tracemalloc
from argparse import Namespace
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from bench.harness import Bench, Figures, log
from headway.engine.clock import VirtualClock
from headway.engine.messages import LoadReport, Submit
from headway.fleet.dispatcher import Dispatcher
from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.fleet.prefixes.tracker import PrefixTracker
from headway.fleet.replica import Replica
from headway.fleet.router import Router
from headway.fleet.routing import ROUTES, ReplicaView, RouteRequest, RouteRule, parse_route
from headway.fleet.settings import FleetSettings
from headway.kv.prefix_index import extend_keys
from headway.lab.cluster import simulate_replicas
from headway.lab.cost import load_profile
from headway.lab.simulate import config_for
from headway.lab.workload.files import adjust, read_workload
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic, zipf
from headway.request import Request, RequestParams

bench = Bench(__doc__)
bench.option("trace", nargs="?", help="a Mooncake .jsonl; without it, the others only")
bench.option("--skip", type=int, default=0, help="leave out the first N requests")
bench.option("--keys", type=int, default=27_000, help="of each full pool, for decision_us")
bench.option("--limit", type=int, help="use only the first N of the other requests")
PROFILE, NUM_REPLICAS = "llama3.1-8b-a100-80gb", 8
NUMS = (8, 256, 1024)  # replicas that decisions are timed with
NUM_REQUESTS, HOT_RATE, UNSHARED_RATE = 2000, 48.0, 36.0
NUM_PREFIXES, PREFIX = 64, 6000  # tokens; together, as many as one replica's cache holds
OTHERS = ("chwbl(prefix_blocks=64)",)  # beside the rules with their default numbers


def longest_prefix(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    """The oracle: most cached tokens; among equals the fewest open requests."""
    turn = request.tick % len(replicas)
    return min(
        range(len(replicas)),
        key=lambda i: (-replicas[i].num_cached, replicas[i].num_open, (i - turn) % len(replicas)),
    )


def shared_prefixes(
    number: int, num_prefixes: int, length: int, rate: float
) -> list[WorkloadRequest]:
    """Requests with a prefix of `length` tokens each, whose popularity falls as 1 / rank."""
    space, random, arrival = TokenSpace(), Random(0), 0.0
    ranks, weights = range(num_prefixes), list(accumulate(zipf(1.0)(num_prefixes)))
    requests = list[WorkloadRequest]()
    for place in range(number):
        (which,) = random.choices(ranks, cum_weights=weights)
        own = space.take(round(random.uniform(50, 800)))
        output = round(random.uniform(20, 200))
        requests.append(WorkloadRequest(
            id=str(place), arrival=arrival, pieces=(*space.shared(which, length), own),
            num_output=output, max_tokens=output,
        ))  # fmt: skip
        arrival += random.expovariate(rate)
    return requests


def unshared() -> list[WorkloadRequest]:
    return parse_synthetic(
        f"requests={NUM_REQUESTS},arrivals=poisson({UNSHARED_RATE}),prompt=lognormal(1500,0.9),"
        "output=lognormal(100,0.7)"
    ).generate()


def measure(
    requests: list[WorkloadRequest], rule: RouteRule, num_replicas: int = NUM_REPLICAS,
    **settings: int,
) -> Figures:  # fmt: skip
    """The figures of one run."""
    profile, start = load_profile(PROFILE), perf_counter()
    config = config_for("headway", profile, settings)
    summary = simulate_replicas(requests, config, profile, num_replicas, route=rule).summary()
    pool = summary["pools"]["colocated"]
    return {
        "hits": round(summary["cache_hit_ratio"], 4),
        **{
            name: {mark: round(summary[name][mark], 4) for mark in ("p50", "p90", "p99")}
            for name in ("ttft", "time_between_tokens", "end_to_end")
        },
        "busy": round(pool["busy"], 3),
        "balance": {name: round(value, 3) for name, value in pool["balance"].items()},
        "completed": summary["completed"],
        "wall_seconds": round(perf_counter() - start, 1),
    }


def compare(name: str, requests: list[WorkloadRequest]) -> Figures:
    """All rules on one workload, with their hits as a share of the oracle's."""
    rules: dict[str, RouteRule] = {rule.__name__: parse_route(rule.__name__) for rule in ROUTES}
    rules |= {text: parse_route(text) for text in OTHERS} | {"oracle": longest_prefix}
    found = {}
    for rule_name, rule in rules.items():
        found[rule_name] = measure(requests, rule)
        log(f"{name} {rule_name}: {found[rule_name]}")
    for each in found.values():
        best = found["oracle"]["hits"]
        each["share_of_oracle_hits"] = round(each["hits"] / best, 4) if best else None
    return {"requests": len(requests), "rules": found}


def decisions(
    num_replicas: int, num_keys: int, num_tokens: int = 8192, block_size: int = 16
) -> Figures:
    """Medians over many decisions, in microseconds; pools hold `num_keys` other keys each."""
    prompt = Request("p", range(num_tokens), RequestParams(max_tokens=1))
    keys = list(PromptKeys(prompt, block_size))
    dispatcher = _full_fleet(num_replicas, num_keys, block_size)
    held = {"nothing": 0, "half": len(keys) // 2, "everything": len(keys)}
    found = {}
    for name, count in held.items():
        for replica in dispatcher.replicas:
            dispatcher.router.tracker.apply(replica, keys[:count], keys[count:])
        found[f"{name} cached"] = _decision_us(dispatcher, prompt)
    for place, replica in enumerate(dispatcher.replicas):
        dispatcher.router.tracker.apply(replica, [], keys if place % 8 else [])
    found["everything cached by one in 8"] = _decision_us(dispatcher, prompt)
    for place, replica in enumerate(dispatcher.replicas):
        count = len(keys) * (place % 16) // 16
        dispatcher.router.tracker.apply(replica, keys[:count], keys[count:])
    return found | {"16 lengths cached": _decision_us(dispatcher, prompt)}


def _full_fleet(num_replicas: int, num_keys: int, block_size: int) -> Dispatcher:
    clock, dropped = VirtualClock(), lambda *_: None
    router = Router(parse_route("prefix_load"), block_size)
    dispatcher = Dispatcher(router, FleetSettings(), clock, dropped, dropped, dropped)
    for place in range(num_replicas):
        replica = Replica(str(place), NullClient())
        dispatcher.add(replica)
        dispatcher.receive(replica, [LoadReport(1, 100 * place, place, place, 1000, 28_000)])
        router.tracker.apply(replica.name, _own_keys(place, num_keys), [], True)
    return dispatcher


def _own_keys(place: int, number: int = 27_000) -> list[bytes]:
    """Keys that no other replica has."""
    hashes = Random(place).randbytes(16 * number)
    return [hashes[16 * each : 16 * each + 16] for each in range(number)]


def _decision_us(dispatcher: Dispatcher, prompt: Request) -> dict[str, float]:
    router, block_size = dispatcher.router, dispatcher.router.block_size
    keys, submit = PromptKeys(prompt, block_size), Submit("p", list(prompt.prompt), prompt.params)

    def submitted() -> None:
        dispatcher.submit(submit)
        request = dispatcher.requests.pop("p")
        replica = dispatcher.replicas[request.replica or ""]
        replica.open.clear()
        replica.outgoing.clear()
        replica._unreported.clear()

    def route() -> None:
        keys = PromptKeys(prompt, block_size)
        router.choose("p", prompt.num_prompt, keys, "")

    submitted()  # the router reads all loads
    return {
        "rule and match": _median_us(lambda: router.choose("p", prompt.num_prompt, keys, "")),
        "hashes, match and rule": _median_us(route),
        "submit": _median_us(submitted),
        "tokens to an array": _median_us(lambda: array("i", submit.prompt)),
        "all hashes": _median_us(lambda: extend_keys([], prompt, block_size)),
    }


KEYS_OF = {  # of 64 replicas
    "own keys": _own_keys,
    "shared keys": lambda _: _own_keys(0),
    "half of each": lambda place: _own_keys(0, 13_500) + _own_keys(place + 1, 13_500),
}


@bench.part
def index(_: Namespace) -> Figures:
    """Bytes of the router's index for each key and replica that has it, and the time to add one."""
    return {name: _index(keys_of) for name, keys_of in KEYS_OF.items()}


def _index(keys_of: Callable[[int], list[bytes]]) -> dict[str, float]:
    num_keys, seconds = sum(len(keys_of(place)) for place in range(64)), list[float]()
    tracker = PrefixTracker()
    tracemalloc.start()
    for place in range(64):
        tracker.apply(str(place), keys_of(place), [], True)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tracker = PrefixTracker()
    for place in range(64):
        keys = keys_of(place)
        start = perf_counter()
        tracker.apply(str(place), keys, [], True)
        seconds.append((perf_counter() - start) / len(keys))
    return {"bytes": round(num_bytes / num_keys, 1), "add_us": round(median(seconds) * 1e6, 2)}


class NullClient:
    """A client of a replica that does not exist."""

    async def open(self, on_messages: object) -> None: ...
    def send(self, messages: list[Any]) -> None: ...
    async def close(self) -> None: ...


def _median_us(work: Any) -> float:
    times = []
    for _ in range(500):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return round(median(times) * 1e6, 1)


@bench.part
def decision_us(asked: Namespace) -> Figures:
    return {f"{number} replicas": decisions(number, asked.keys) for number in NUMS}


bench.parts |= {
    "hot": lambda _: compare("hot", shared_prefixes(NUM_REQUESTS, NUM_PREFIXES, PREFIX, HOT_RATE)),
    "unshared": lambda _: compare("unshared", unshared()),
}


@bench.part
def trace(asked: Namespace) -> Figures:
    """By the name of the file; nothing without a file."""
    if not asked.trace:
        return {}
    requests = adjust(islice(read_workload(asked.trace), asked.skip, None), asked.limit, 1.0)
    return {Path(asked.trace).stem: compare("trace", requests)}


if __name__ == "__main__":
    bench.main()
