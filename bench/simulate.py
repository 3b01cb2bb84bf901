"""Speed and memory of the simulator: CPU seconds, steps per second and peak memory of whole runs.

    python bench/simulate.py                        an hour of chat requests, two presets
    python bench/simulate.py azure2023_conv.csv     the same with a trace file as well
    python bench/simulate.py --million              one million short requests, for the memory

Every run is a process of its own, on the 8B profile. The synthetic hour has the number of requests,
the rate and the mean lengths of Azure's conversation trace of 2023. Prints one JSON object: CPU
seconds to read the workload, to simulate it and to summarize it, and the peak memory in MiB, before
the simulation and at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.cli.options.simulation import make_config
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import load_workload

PROFILE = "llama3.1-8b-a100-80gb"
PRESETS = ("headway", "vllm_v1")
HOUR = "requests=19366,arrivals=poisson(5.5),prompt=lognormal(1155,1.0),output=lognormal(211,0.7,1,1000)"
MILLION = "requests=1000000,arrivals=poisson(40),prompt=lognormal(200,0.6),output=lognormal(25,0.5)"


def measure(workload: str, preset: str) -> dict[str, Any]:
    """One run in this process."""
    profile = load_profile(PROFILE)
    config = make_config(preset, profile, {})
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


def measure_apart(workload: str, preset: str) -> Any:
    """The same in a new process, so that its memory is its own."""
    command = [sys.executable, __file__, "--one", workload, preset]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traces", nargs="*", help="workload files to run as well")
    parser.add_argument("--million", action="store_true", help="only one million short requests")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return
    if given.million:
        print(
            json.dumps(
                {"million": {"workload": MILLION, "headway": measure_apart(MILLION, "headway")}},
                indent=2,
            )
        )
        return
    results = {}
    for workload in (HOUR, *given.traces):
        name = "synthetic hour" if workload is HOUR else Path(workload).name
        results[name] = {preset: measure_apart(workload, preset) for preset in PRESETS}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
