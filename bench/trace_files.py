"""Whole request traces through the simulator: how long it takes, how much memory, what is reused.

    python bench/trace_files.py azure2023_conv.csv mooncake_conversation_first4000.jsonl

A .csv is served with the 8B profile as it is. A Mooncake .jsonl is served with a KV cache so large
that nothing is ever evicted, one request at a time: then the share of its 512-token blocks that are
hit must be the share of its own hash ids that were there before. Rejected requests count in neither.
Prints one JSON object; seconds are of this machine, memory is the peak of the process in MiB.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import MOONCAKE_BLOCK, block_reuse, read_jobs
from headway.plan import StepReport
from headway.scheduler import preset

PROFILE = "llama3.1-8b-a100-80gb"
BLOCK = 16


def serve(path: str) -> dict[str, Any]:
    """A trace as it is, by the default preset."""
    profile = load_profile(PROFILE)
    start = perf_counter()
    config = preset(num_blocks=profile.num_blocks(BLOCK), block_size=BLOCK)
    run = simulate(read_jobs(path), config, profile)
    seconds = perf_counter() - start
    summary = summarize(run.metrics, len(run.rejected))
    return {
        "requests": summary["requests"],
        "rejected": summary["rejected"],
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "times_real_time": round(summary["seconds"] / seconds),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def reuse(path: str) -> dict[str, Any]:
    """Blocks of 512 tokens that are hit, against those the trace itself repeats."""
    profile, jobs = load_profile(PROFILE), read_jobs(path)
    num_tokens = sum(job.num_prompt + job.num_output for job in jobs)
    hits = [0]

    def count(report: StepReport) -> None:
        for admission in report.plan.admitted:
            hits[0] += -(-admission.num_cached // MOONCAKE_BLOCK)

    start = perf_counter()
    config = preset(
        "vllm_v1", num_blocks=num_tokens // BLOCK + len(jobs), block_size=BLOCK, max_num_seqs=1
    )
    run = simulate(jobs, config, profile, observers=[count])
    expected = block_reuse(path, skip={id for id, _ in run.rejected})
    return {
        "requests": len(run.metrics.requests),
        "rejected": len(run.rejected),
        "seconds": round(perf_counter() - start, 1),
        "blocks": expected.num_blocks,
        "hit_ratio": round(hits[0] / expected.num_blocks, 5),
        "trace_reuse": round(expected.share, 5),
        "token_hit_ratio": round(summarize(run.metrics)["cache_hit_ratio"], 5),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    results = {
        Path(path).name: reuse(path) if path.endswith(".jsonl") else serve(path)
        for path in sys.argv[1:]
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
