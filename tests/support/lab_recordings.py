"""Recordings for the unit tests of the lab page: swaps, shared prefixes, async scheduling, preemptions.

python -m tests.support.lab_recordings DIRECTORY     write them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headway.lab.recording.run import SimulatedRun
from headway.lab.recording.spec import read_spec

TWENTY = zip("ABCDEF", (40, 64, 30, 80, 50, 20), (60, 40, 50, 30, 40, 60), strict=True)
SPECS: dict[str, dict[str, Any]] = {
    "blocks": {
        "preset": "nano_vllm", "set": {"num_blocks": 20},
        "requests": [{"id": id, "prompt": prompt, "output": output} for id, prompt, output in TWENTY],
    },
    "swap": {
        "preset": "vllm", "set": {"num_blocks": 90, "swap": "swap", "num_host_blocks": 60},
        "workload": "requests=60,prompt=uniform(20,200),output=uniform(20,120),arrivals=poisson(40)",
    },
    "prefix": {
        "preset": "vllm_v1", "set": {"num_blocks": 200, "max_num_batched_tokens": 128},
        "workload": "requests=120,prompt=uniform(20,60),output=uniform(10,60),prefix=2x96,"
        "arrivals=poisson(60)",
        "async_scheduling": True,
    },
    "edits": {
        "preset": "headway", "set": {"num_blocks": 60}, "workload": "requests=20,prompt=64,output=64",
        "edits": [
            {"step": 5, "add": {"id": "new", "prompt": 30, "output": 9}}, {"step": 9, "abort": "3"},
            {"step": 12, "set": {"victim": "least_work"}},
        ],
    },
}  # fmt: skip


def write_recordings(folder: Path) -> None:
    """One file for each spec."""
    for name, spec in SPECS.items():
        (folder / f"{name}.recording").write_bytes(b"".join(SimulatedRun(read_spec(spec)).record()))


if __name__ == "__main__":
    write_recordings(Path(sys.argv[1]))
