"""The simulator: speed and memory of whole runs, and prefix cache hits of complete traces.

    python -m bench.lab.simulate                             an hour of chat requests, two presets
    python -m bench.lab.simulate azure2023_conv.csv          the same with a trace file as well
    python -m bench.lab.simulate --only million              one million short requests
    python -m bench.lab.simulate azure2023_conv.csv mooncake_first4000.jsonl --only traces

runs     every run is a process of its own, on the 8B profile. The synthetic hour has the number of
         requests, the rate and the mean lengths of Azure's conversation trace of 2023. CPU seconds
         to read the workload, to simulate it and to summarize it, and the peak memory in MiB,
         before the simulation and at the end
million  the same for one million short requests, for the memory
traces   a .csv runs unchanged on the 8B profile. A Mooncake .jsonl runs one request at a time with a
         KV cache that never evicts a block. Then the hit ratio of its 512-token blocks must equal
         the share of hash ids that occur in earlier requests. Rejected requests are ignored in both
"""

from __future__ import annotations

import resource
from argparse import Namespace
from collections.abc import Container
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from bench.harness import Bench, Figures, in_new_process
from headway.cli.options.simulation import make_config
from headway.events import Event, Planned
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import MOONCAKE_BLOCK, load_workload, read_workload
from headway.lab.workload.rows import read_rows
from headway.scheduler import preset

bench = Bench(__doc__)
bench.option("traces", nargs="*", help="workload files")
PROFILE = "llama3.1-8b-a100-80gb"
BLOCK = 16
PRESETS = ("headway", "vllm_v1")
HOUR = "requests=19366,arrivals=poisson(5.5),prompt=lognormal(1155,1.0),output=lognormal(211,0.7,1,1000)"
MILLION = "requests=1000000,arrivals=poisson(40),prompt=lognormal(200,0.6),output=lognormal(25,0.5)"


def measure(workload: str, name: str) -> Figures:
    """One run."""
    profile = load_profile(PROFILE)
    config = make_config(name, profile, {})
    marks = [process_time()]
    requests = load_workload(workload, None, 1.0, None)
    marks.append(process_time())
    before = peak_mib()
    result = simulate(requests, config, profile)
    marks.append(process_time())
    summary = summarize(result.metrics, len(result.rejected))
    marks.append(process_time())
    read, run, summed = (b - a for a, b in pairwise(marks))
    return {
        "requests": summary["requests"], "steps": summary["steps"],
        "simulated_seconds": round(summary["seconds"]),
        "cpu_seconds": {"read": round(read, 2), "simulate": round(run, 2), "summarize": round(summed, 2)},
        "steps_per_second": round(summary["steps"] / run),
        "requests_per_second": round(summary["requests"] / run),
        "peak_mib": {"before": before, "end": peak_mib()},
    }  # fmt: skip


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@bench.part
def runs(asked: Namespace) -> Figures:
    return {
        "synthetic hour" if workload is HOUR else Path(workload).name: {
            name: in_new_process(measure, workload, name) for name in PRESETS
        }
        for workload in (HOUR, *asked.traces)
    }


@bench.part
def million(_: Namespace) -> Figures:
    return {"workload": MILLION, "headway": in_new_process(measure, MILLION, "headway")}


class CacheHits(NamedTuple):
    """Prompt blocks of a workload, and those that an unlimited prefix cache would hit."""

    num_blocks: int
    num_hits: int

    @property
    def ratio(self) -> float:
        return self.num_hits / self.num_blocks


def ideal_cache_hits(path: str | Path, skip: Container[str] = ()) -> CacheHits:
    """Count the blocks of a Mooncake file, and those that an unlimited prefix cache would hit.

    Requests whose ids are in `skip`, such as rejected ones, are ignored. Every hash id counts as
    one block, including a partial last one. A block is a hit if it and all blocks before it in its
    prompt occur in prompts of earlier lines.
    """
    seen: set[int | str] = set()
    num_blocks = num_hits = 0
    numbers = count()  # a line without an id is named by its number, as in `read_workload`
    rows = read_rows(Path(path), lambda row: (row.text("id", str(next(numbers))), row.hashes()))
    for hashes in (hashes for id, hashes in rows if id not in skip):
        new = (place for place, block in enumerate(hashes) if block not in seen)
        num_hits += next(new, len(hashes))
        num_blocks += len(hashes)
        seen.update(hashes)
    return CacheHits(num_blocks, num_hits)


def measure_run(path: str) -> Figures:
    """Simulate a trace with the default preset."""
    profile = load_profile(PROFILE)
    start = perf_counter()
    config = preset(num_blocks=profile.num_blocks(BLOCK), block_size=BLOCK)
    result = simulate(read_workload(path), config, profile)
    seconds = perf_counter() - start
    summary = summarize(result.metrics, len(result.rejected))
    return {
        **{name: summary[name] for name in ("requests", "rejected", "steps")},
        "seconds": round(seconds, 1),
        "times_real_time": round(summary["seconds"] / seconds),
        "peak_mib": peak_mib(),
    }


def measure_hits(path: str) -> Figures:
    """The hit ratio of 512-token blocks, and that of an unlimited prefix cache."""
    profile, requests = load_profile(PROFILE), read_workload(path)
    num_tokens = sum(request.num_prompt + request.num_output for request in requests)
    hits = [0]

    def count(event: Event) -> None:
        for admission in event.plan.admitted if isinstance(event, Planned) else ():
            hits[0] += -(-admission.num_cached // MOONCAKE_BLOCK)

    start = perf_counter()
    config = preset(
        "vllm_v1", num_blocks=num_tokens // BLOCK + len(requests), block_size=BLOCK, max_num_seqs=1
    )
    result = simulate(requests, config, profile, observers=[count])
    expected = ideal_cache_hits(path, skip={id for id, _ in result.rejected})
    return {
        "requests": len(result.metrics.requests),
        "rejected": len(result.rejected),
        "seconds": round(perf_counter() - start, 1),
        "blocks": expected.num_blocks,
        "hit_ratio": round(hits[0] / expected.num_blocks, 5),
        "ideal_hit_ratio": round(expected.ratio, 5),
        "token_hit_ratio": round(summarize(result.metrics)["cache_hit_ratio"], 5),
        "peak_mib": peak_mib(),
    }


@bench.part
def traces(asked: Namespace) -> Figures:
    return {
        Path(path).name: measure_hits(path) if path.endswith(".jsonl") else measure_run(path)
        for path in asked.traces
    }


if __name__ == "__main__":
    bench.on_demand = {"million", "traces"}
    bench.main()
