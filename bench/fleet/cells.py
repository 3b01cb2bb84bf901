"""A flat router over many simulated replicas against cells of 64 behind consistent hashing.

    python -m bench.fleet.cells --replicas 1024

Requests share prefixes with a Zipf distribution. The flat router follows the caches of all replicas;
a cell's router follows those of its own, so it has 1/16 of the deltas and of the index.

hits             share of prompt tokens found in a cache
balance          largest busy time and largest number of computed tokens of a replica, by the mean
choose_us        CPU time of a decision, as the simulated router made it over all replicas
delta_us         CPU time to follow the caches, for each request of the whole fleet
Prints one JSON object. Times of requests are simulated seconds.
"""

from __future__ import annotations

from argparse import Namespace
from random import Random
from time import process_time
from typing import Any

from bench.harness import Bench, Figures, log
from headway.fleet.prefix_tracker import PrefixTracker
from headway.fleet.router import Router
from headway.fleet.routing import parse_route
from headway.lab.cluster import simulate_replicas
from headway.lab.cost import load_profile
from headway.lab.simulate import config_for
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import zipf

RULES = ("prefix_load", "cells", "chwbl", "least_loaded")

bench = Bench(__doc__)
bench.option("--replicas", type=int, default=1024)
bench.option("--requests", type=int, default=10, help="of each replica")
bench.option("--routes", nargs="+", default=RULES)
PROFILE, RATE = "llama3.1-8b-a100-80gb", 5.0  # requests per second and replica
PREFIX, PREFIXES_PER_REPLICA = 3000, 4  # tokens
NUM_BLOCKS = 4000  # of a replica: 21 prefixes


def workload(num_replicas: int, per_replica: int) -> list[WorkloadRequest]:
    space, random, arrival = TokenSpace(), Random(0), 0.0
    num_prefixes = PREFIXES_PER_REPLICA * num_replicas
    chosen = random.choices(
        range(num_prefixes), zipf(1.0)(num_prefixes), k=per_replica * num_replicas
    )
    requests = []
    for number, which in enumerate(chosen):
        own = space.take(round(random.uniform(50, 800)))
        output = round(random.uniform(20, 200))
        requests.append(WorkloadRequest(
            id=str(number), arrival=arrival, pieces=(*space.shared(which, PREFIX), own),
            num_output=output, max_tokens=output,
        ))  # fmt: skip
        arrival += random.expovariate(RATE * num_replicas)
    return requests


class Timed:
    """A method of a class while in use: adds up the CPU time of its calls."""

    def __init__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name, self._call = owner, name, getattr(owner, name)
        self.seconds, self.number = 0.0, 0

    def __enter__(self) -> Timed:
        def timed(*args: Any, **named: Any) -> Any:
            start = process_time()
            try:
                return self._call(*args, **named)
            finally:
                self.seconds += process_time() - start
                self.number += 1

        setattr(self._owner, self._name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._call)


def measure(requests: list[WorkloadRequest], text: str, num_replicas: int) -> Figures:
    profile = load_profile(PROFILE)
    config = config_for("headway", profile, {"num_blocks": NUM_BLOCKS})
    with Timed(Router, "choose") as choose, Timed(PrefixTracker, "apply") as apply:
        result = simulate_replicas(requests, config, profile, num_replicas, route=parse_route(text))
    summary = result.summary()
    whole = summary["pools"]["colocated"]
    return {
        "hits": round(summary["cache_hit_ratio"], 4),
        "ttft": {mark: round(summary["ttft"][mark], 4) for mark in ("p50", "p90", "p99")},
        "busy": round(whole["busy"], 3),
        "balance": {name: round(value, 3) for name, value in whole["balance"].items()},
        "completed": summary["completed"],
        "choose_us": round(choose.seconds / choose.number * 1e6, 1),
        "delta_us": round(apply.seconds / choose.number * 1e6, 1),
        "deltas": apply.number,
    }


@bench.part
def cells(asked: Namespace) -> Figures:
    requests = workload(asked.replicas, asked.requests)
    found = {}
    for text in asked.routes:
        found[text] = measure(requests, text, asked.replicas)
        log(f"{text}: {found[text]}")
    return {"replicas": asked.replicas, "requests": len(requests), "rules": found}


if __name__ == "__main__":
    bench.main()
