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
from time import process_time
from typing import Any

from bench.fleet.routing import measure, shared_prefixes
from bench.harness import Bench, Figures, log
from headway.fleet.prefixes.tracker import PrefixTracker
from headway.fleet.router import Router
from headway.fleet.routing import parse_route
from headway.lab.workload.request import WorkloadRequest

RULES = ("prefix_load", "cells", "chwbl", "least_loaded")

bench = Bench(__doc__)
bench.option("--replicas", type=int, default=1024)
bench.option("--requests", type=int, default=10, help="of each replica")
bench.option("--routes", nargs="+", default=RULES)
RATE = 5.0  # requests per second and replica
PREFIX, PREFIXES_PER_REPLICA = 3000, 4  # tokens
NUM_BLOCKS = 4000  # of a replica: 21 prefixes


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


def timed_run(requests: list[WorkloadRequest], text: str, num_replicas: int) -> Figures:
    with Timed(Router, "choose") as choose, Timed(PrefixTracker, "apply") as apply:
        found = measure(requests, parse_route(text), num_replicas, num_blocks=NUM_BLOCKS)
    return found | {
        "choose_us": round(choose.seconds / choose.number * 1e6, 1),
        "delta_us": round(apply.seconds / choose.number * 1e6, 1),
        "deltas": apply.number,
    }


@bench.part
def cells(asked: Namespace) -> Figures:
    number = asked.replicas
    requests = shared_prefixes(
        asked.requests * number, PREFIXES_PER_REPLICA * number, PREFIX, RATE * number
    )
    found = {}
    for text in asked.routes:
        found[text] = timed_run(requests, text, number)
        log(f"{text}: {found[text]}")
    return {"replicas": number, "requests": len(requests), "rules": found}


if __name__ == "__main__":
    bench.main()
