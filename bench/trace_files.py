"""Complete request traces in the simulator: run time, memory and prefix cache hits.

    python bench/trace_files.py azure2023_conv.csv mooncake_conversation_first4000.jsonl

A .csv runs unchanged on the 8B profile. A Mooncake .jsonl runs one request at a time with a KV cache
that never evicts a block. Then the hit ratio of its 512-token blocks must equal the share of hash
ids that occur in earlier requests. Rejected requests are ignored in both. Prints one JSON object;
seconds are measured on this machine, memory is the peak of the process in MiB.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Container
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.events import Event, Planned
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import MOONCAKE_BLOCK, read_workload
from headway.lab.workload.rows import read_rows
from headway.scheduler import preset

PROFILE = "llama3.1-8b-a100-80gb"
BLOCK = 16


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


def measure_run(path: str) -> dict[str, Any]:
    """Simulate a trace with the default preset."""
    profile = load_profile(PROFILE)
    start = perf_counter()
    config = preset(num_blocks=profile.num_blocks(BLOCK), block_size=BLOCK)
    result = simulate(read_workload(path), config, profile)
    seconds = perf_counter() - start
    summary = summarize(result.metrics, len(result.rejected))
    return {
        "requests": summary["requests"],
        "rejected": summary["rejected"],
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "times_real_time": round(summary["seconds"] / seconds),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def measure_hits(path: str) -> dict[str, Any]:
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
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    results = {
        Path(path).name: measure_hits(path) if path.endswith(".jsonl") else measure_run(path)
        for path in sys.argv[1:]
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
