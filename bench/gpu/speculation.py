"""The gain from drafts on a GPU, with random weights and synthetic acceptance.

    python -m bench.gpu.speculation                     prints one JSON object
    python -m bench.gpu.speculation --shapes qwen2.5-7b --batch 1 256 --repeat 2

As random weights repeat no text, the drafts are arbitrary tokens, and a hash of request and position
decides how many of them count as right: each with probability --share up to the first that does not.
0.645 gives 2.5 tokens of a verification with four drafts. Everything else is as with real drafts.

none        output tokens/s without drafts, of --batch requests of 128 prompt and 256 output tokens
fixed(4)    the same with four drafts for every request, and the ratio
by_cost     the same with a number of drafts that follows from the cost of a step
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from bench.gpu.speed import dummy, fixed, run
from bench.harness import Bench, Figures, log
from headway.config import Config
from headway.engine_setup import with_measured_costs
from headway.executor.gpu import executor as gpu_executor
from headway.plan import Draft
from headway.request import Request
from headway.scheduler.policies import draft as rules

bench = Bench(__doc__)
bench.option("--shapes", nargs="+", default=["qwen2.5-7b", "qwen3-0.6b"])
bench.option("--batch", nargs="+", type=int, default=[1, 8, 32, 256])
bench.option("--share", type=float, default=0.645)
bench.option("--repeat", type=int, default=2)
NUM_DRAFTS, PROMPT, OUTPUT = 4, 128, 256


class Arbitrary:
    """Drafts as many tokens as are asked for."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return range(100, 100 + most)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def arbitrary() -> Arbitrary:
    return Arbitrary()


def accept(share: float) -> None:
    """From now on executors in this process count drafts as right with this probability."""

    def right_tokens(draft: Draft, sampled: Sequence[int]) -> list[int]:
        count = 1
        while count <= draft.count and chance(draft.request.id, draft.start + count) < share:
            count += 1
        return list(sampled[:count])

    gpu_executor.right_tokens = right_tokens


def chance(id: str, position: int) -> float:
    digest = blake2b(f"{id} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def measure(asked: Namespace) -> Figures:
    accept(asked.share)
    report: Figures = {"share": asked.share}
    for shape in asked.shapes:
        with dummy(shape, max_model_len=1024) as llm:
            scheduler = llm.engine.scheduler
            plain: Config = scheduler.config
            with_rules = {
                "none": plain,
                "fixed(4)": replace(plain, draft=rules.fixed(NUM_DRAFTS), drafter=arbitrary),
                "by_cost": with_measured_costs(
                    replace(plain, draft=rules.by_cost(most=NUM_DRAFTS), drafter=arbitrary),
                    llm.executor,
                    is_async=True,
                ),
            }
            for batch in asked.batch:
                work, seconds = fixed(batch, PROMPT, OUTPUT), dict[str, list[float]]()
                for turn in range(asked.repeat + 1):
                    for name, config in with_rules.items():
                        scheduler.reconfigure(config)
                        took = run(llm, work, 0.6)
                        if turn:
                            seconds.setdefault(name, []).append(took)
                figures = {
                    name: {
                        "output_tokens_per_second": batch * OUTPUT / statistics.median(each),
                        "ratio": statistics.median(
                            off / on for off, on in zip(seconds["none"], each, strict=True)
                        ),
                    }
                    for name, each in seconds.items()
                }
                report[f"{shape}, batch {batch}"] = figures
                log(f"{shape}, batch {batch}: {figures}")
            costs = with_rules["by_cost"].draft
            report[f"{shape}, costs"] = str(costs)
    return report


if __name__ == "__main__":
    bench.main(measure)
