"""Why preset nano_vllm differs from the later version of nano-vLLM, workload by workload.

python -m tests.scheduler.reference.attribution 5000
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from math import inf

from headway.scheduler import preset
from tests.scheduler.reference.compare import Pair, Workload, crowded_workload
from tests.scheduler.reference.differences import build
from tests.scheduler.reference.nano_vllm_later import LATER_NANO_VLLM, LaterNanoVLLM


def later_pair(workload: Workload, names: Iterable[str]) -> Pair:
    """The preset, and the later version with the named differences."""
    changed = build(LaterNanoVLLM, tuple(LATER_NANO_VLLM[name] for name in names))
    limits = workload.limits._asdict()
    del limits["eos"]
    return Pair(changed(workload.limits), preset("nano_vllm", **limits), workload)


def first_difference(workload: Workload, names: Iterable[str], until: float = inf) -> float:
    """The first step in which they differ; infinity if there is none up to the given one."""
    pair = later_pair(workload, names)
    return pair.step if pair.run(until) else inf


def causes(workload: Workload) -> tuple[str, ...] | None:
    """Names that explain the first difference and of which none can be left out.

    None if nothing differs; no names if anything differs with all of them.
    """
    step, names = first_difference(workload, ()), list(LATER_NANO_VLLM)
    if first_difference(workload, names) < inf:
        return ()
    if step == inf:
        return None
    for name in list(names):
        others = [each for each in names if each != name]
        if first_difference(workload, others, step) > step:
            names = others
    return tuple(names)


def main(num_workloads: int) -> None:
    found = Counter(causes(crowded_workload(seed)) for seed in range(num_workloads))
    num_equal = found.pop(None, 0)
    print(f"{num_workloads} workloads, {num_workloads - num_equal} differ")
    print(f"{found.pop((), 0)} without a name")
    for names, num in found.most_common():
        print(f"{num:6} {' + '.join(names)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
