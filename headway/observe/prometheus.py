"""Definitions of all metrics, their values, and the Prometheus text format.

Names and buckets are vLLM's where vLLM has the same metric, so that its dashboards work.
docs/metrics.md explains each metric. `ServerMetrics` fills in the values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
BUCKETS: dict[str, tuple[float, ...]] = {  # others have REQUEST_BUCKETS
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency_seconds": ITL_BUCKETS,
    "request_longest_stall_seconds": ITL_BUCKETS,
    "request_params_n": (1, 2, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "swap_in_seconds": (2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0),
    "scheduler_step_seconds": (
        1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1, 1.0,
    ),
}  # fmt: skip
# Their buckets are 1, 2, 5, 10, ... up to max_model_len.
TOKEN_COUNTS = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")

GAUGES = {
    "num_requests_running": "Running requests.",
    "num_requests_waiting": "Waiting requests, including preempted and swapped ones.",
    "num_requests_swapped": "Waiting requests whose KV blocks are kept on the host.",
    "kv_cache_usage_perc": "Fraction of the KV blocks in use, 0 to 1.",
    "waiting_by_reason": "Waiting requests by the reason that the latest plan gave.",
    "snapshot_age_seconds": "Age of the gauges: time since the step began, 0 between steps.",
}
COUNTERS = {
    "num_preemptions": "Preemptions of running requests.",
    "prompt_tokens": "Tokens of completely computed prompts, including cached tokens.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "request_success": "Finished requests by finish reason.",
    "builds": "Kernels compiled and CUDA graphs captured after the engine was ready.",
    "prefill_tokens": "Tokens computed by prefill, including recomputed tokens.",
    "recomputed_tokens": "Tokens recomputed after a preemption.",
    "swapped_blocks": "KV blocks copied to the host (out) and from the host (in).",
    "spec_decode_num_drafts": "Drafts that were verified: one per request and step.",
    "spec_decode_num_draft_tokens": "Tokens of drafts.",
    "spec_decode_num_accepted_tokens": "Tokens of drafts that became output.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted tokens by their place in the draft.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two consecutive tokens of a request.",
    "e2e_request_latency_seconds": "Time from arrival to the end.",
    "request_queue_time_seconds": "Time from arrival to the first admission.",
    "request_prefill_time_seconds": "Time from the first admission to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last token.",
    "request_longest_stall_seconds": "The longest time between two consecutive tokens of a request.",
    "request_inference_time_seconds": "Time from the first admission to the last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
    "request_params_max_tokens": "The max_tokens parameter of a request.",
    "request_params_n": "The n parameter of a request.",
    "iteration_tokens_total": "Tokens computed in one step.",
    "swap_in_seconds": "Time to copy the KV blocks of a step from the host.",
    "scheduler_step_seconds": "Time that the scheduler needs for one plan.",
}
LABELS = {
    "waiting_by_reason": "reason",
    "request_success": "finished_reason",
    "swapped_blocks": "direction",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}
VALUES = {
    "request_success": ("stop", "length", "abort", "error"),
    "swapped_blocks": ("out", "in"),
    "spec_decode_num_accepted_tokens_per_pos": ("0",),  # others begin with the first such draft
}


class Histogram:
    """Counts by bucket. One call may observe a value several times."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def copy(self) -> Histogram:
        copied = Histogram(self.bounds)
        copied.counts, copied.total = self.counts.copy(), self.total
        return copied

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus expects them."""
        pairs, num_so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_so_far += count
            pairs.append((floatToGoString(bound), float(num_so_far)))  # type: ignore[no-untyped-call]
        return pairs


@dataclass(slots=True)
class MetricValues:
    """The values of all metrics, by name and by label value ("" without a label)."""

    histograms: dict[str, Histogram]
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)
    gauges: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def empty(cls, max_model_len: int) -> MetricValues:
        steps = (mantissa * 10.0**power for power in range(20) for mantissa in (1, 2, 5))
        tokens = tuple(step for step in steps if step <= max_model_len)
        buckets = BUCKETS | dict.fromkeys(TOKEN_COUNTS, tokens)
        histograms = {name: Histogram(buckets.get(name, REQUEST_BUCKETS)) for name in HISTOGRAMS}
        names = [(name, label) for name in COUNTERS for label in VALUES.get(name, ("",))]
        return cls(histograms, Counter(dict.fromkeys(names, 0)))  # a rate needs a first value

    def copy(self) -> MetricValues:
        """A copy that later steps do not change."""
        histograms = {name: histogram.copy() for name, histogram in self.histograms.items()}
        return MetricValues(histograms, self.counters.copy(), self.gauges.copy())


@dataclass(frozen=True, slots=True)
class Exposition(Collector):
    """Exposes metric values to Prometheus under a name prefix."""

    values: MetricValues
    prefix: str
    labels: dict[str, str]  # labels of every metric
    cache: dict[str, str]  # sizes of the KV cache: labels of cache_config_info

    def text(self) -> str:
        return (generate_latest(self) + generate_latest(PROCESS)).decode()

    def collect(self) -> Iterator[Metric]:
        yield from self._families(GaugeMetricFamily, GAUGES, self.values.gauges)
        yield from self._families(CounterMetricFamily, COUNTERS, self.values.counters)
        for name, text in HISTOGRAMS.items():
            found = self.values.histograms[name]
            family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), found.buckets(), found.total)
            yield family
        facts, name = self.labels | self.cache, f"{self.prefix}:cache_config_info"
        text = "Always 1. The labels are the sizes of the KV cache."
        info = GaugeMetricFamily(name, text, labels=list(facts))
        info.add_metric(list(facts.values()), 1.0)
        yield info

    def _families(
        self, kind: type[Any], texts: dict[str, str], values: Mapping[tuple[str, str], float]
    ) -> Iterator[Metric]:
        for name, text in texts.items():
            label = [LABELS[name]] if name in LABELS else []
            family = kind(f"{self.prefix}:{name}", text, labels=[*self.labels, *label])
            for (owner, value_of_label), value in values.items():
                if owner == name:
                    own = [value_of_label] if label else []
                    family.add_metric([*self.labels.values(), *own], value)
            yield family


PROCESS = CollectorRegistry()
ProcessCollector(registry=PROCESS)  # memory, CPU time, open files
