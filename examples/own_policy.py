"""Write your own policies: plain functions, and a queue rule as a class with a number.

Run it as a script from the root of the repository:
    python examples/own_policy.py
or name one of the functions on the command line:
    headway simulate --preset vllm_v1 --num-blocks 600 --victim examples.own_policy:longest_to_go
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway import Config, Request, SchedulerView, preset
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies.queue import Rule

WORKLOAD = "requests=60,prompt=uniform(100,600),output=uniform(50,400)"


def longest_to_go(request: Request, view: SchedulerView) -> Any:
    """Victim: the largest key is preempted first. Here: the request with most tokens left."""
    return request.limit - request.num_known, request.history.serial


def a_block_each(request: Request, view: SchedulerView) -> int:
    """Headroom: blocks that must stay free. Here: one for this and each running request."""
    return 1 + len(list(view.running))


def small_first(request: Request, view: SchedulerView) -> Any:
    """Queue: the lowest key is admitted first. Here: a token counts as 10 ms of waiting.

    The arrival in the key bounds the wait: later small requests overtake an old one only for a while.
    """
    return request.arrival + 0.01 * request.limit


@dataclass(frozen=True)
class two_sizes(Rule):
    """Queue, as a class: `small_first` in two groups, of requests up to and above `large` tokens.

    The group with the least service is served first, so a stream of small requests does not keep
    the large ones waiting. A key depends on the request alone: it is computed when the request
    enters the queue, and again after a preemption.
    """

    large: int = 500

    def key(self, request: Request, view: SchedulerView) -> Any:
        return small_first(request, view)

    def group(self, request: Request) -> str:
        return "large" if request.limit > self.large else "small"


def main() -> None:
    base = preset("vllm_v1", num_blocks=600)
    configs: dict[str, Config] = {
        "vllm_v1": base,
        "longest_to_go": preset("vllm_v1", num_blocks=600, victim=longest_to_go),
        "a_block_each": preset("vllm_v1", num_blocks=600, headroom=a_block_each),
        "small_first": preset("vllm_v1", num_blocks=600, queue=small_first),
        "two_sizes": preset("vllm_v1", num_blocks=600, queue=two_sizes(600)),
    }
    requests, profile = parse_synthetic(WORKLOAD).generate(), load_profile("llama3.1-8b-a100-80gb")
    for name, config in configs.items():
        summary = summarize(simulate(requests, config, profile).metrics)
        print(
            f"{name:13} {summary['steps']} steps, {summary['preemptions']:2} preemptions, "
            f"{summary['recomputed_tokens']:5,} tokens recomputed, "
            f"mean time to first token {summary['ttft']['mean']:.1f} s"
        )


if __name__ == "__main__":
    main()
