"""Every metric by name, its help and its buckets; numbers kept by name, and their Prometheus text.

Names and buckets are vLLM's where it has the same thing, so that its dashboards work. What each
one means for an operator is in docs/metrics.md. Fills nothing itself.
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

FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
PLANNING = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1, 1.0)
PER_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
TOKENS: tuple[float, ...] = ()  # 1, 2, 5, 10, 20, ... up to the model's length

GAUGES = {
    "num_requests_running": "Requests that have a seat.",
    "num_requests_waiting": "Requests that wait, those preempted and swapped out among them.",
    "num_requests_swapped": "Of those that wait: their computed tokens are kept on the host.",
    "kv_cache_usage_perc": "Share of the KV blocks that requests hold; 1 is all of them.",
    "waiting_by_reason": "Requests that wait, by what the latest plan did not have for them.",
    "snapshot_age_seconds": "Age of these values: the time since the running step began, 0 if none.",
}
COUNTERS = {
    "num_preemptions": "Times a running request was sent back to wait.",
    "prompt_tokens": "Tokens of prompts computed to their end, cached ones among them.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "request_success": "Requests that ended, by how.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "swapped_blocks": "KV blocks copied to the host (out) and back (in).",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST),
    "inter_token_latency_seconds": ("Between one token and the next of a request.", BETWEEN),
    "e2e_request_latency_seconds": ("From arrival to the end.", WHOLE),
    "request_queue_time_seconds": ("From arrival to the first seat.", WHOLE),
    "request_prefill_time_seconds": ("From the first seat to the first token.", WHOLE),
    "request_decode_time_seconds": ("From the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("From the first seat to the last token.", WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", TOKENS),
    "request_params_max_tokens": ("The max_tokens that was asked for.", TOKENS),
    "request_params_n": ("The n that was asked for.", SAMPLES),
    "iteration_tokens_total": ("Tokens computed in one step.", PER_STEP),
    "scheduler_step_seconds": ("The scheduler's time to make one plan.", PLANNING),
}
LABELS = {
    "waiting_by_reason": "reason",
    "request_success": "finished_reason",
    "swapped_blocks": "direction",
}
VALUES = {"request_success": ("stop", "length", "abort", "error"), "swapped_blocks": ("out", "in")}


class Histogram:
    """Counts by bucket; the same value may be observed many times at once."""

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
        """Upper bounds with how many were not above, as Prometheus wants them."""
        pairs, num_so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_so_far += count
            pairs.append((floatToGoString(bound), float(num_so_far)))  # type: ignore[no-untyped-call]
        return pairs


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (mantissa * 10.0**power for power in range(20) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= most]


@dataclass(slots=True)
class Numbers:
    """The values of all metrics, by name and by the value of its label, if it has one."""

    histograms: dict[str, Histogram]
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)
    gauges: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def empty(cls, max_model_len: int) -> Numbers:
        tokens = one_two_five(max_model_len)
        histograms = {name: Histogram(b or tokens) for name, (_, b) in HISTOGRAMS.items()}
        names = [(name, label) for name in COUNTERS for label in VALUES.get(name, ("",))]
        return cls(histograms, Counter(dict.fromkeys(names, 0)))  # a rate needs a beginning

    def copy(self) -> Numbers:
        """The same values, which no later step changes."""
        histograms = {name: histogram.copy() for name, histogram in self.histograms.items()}
        return Numbers(histograms, self.counters.copy(), self.gauges.copy())


@dataclass(frozen=True, slots=True)
class Exposition(Collector):
    """Numbers as Prometheus reads them, under a prefix."""

    numbers: Numbers
    prefix: str
    labels: dict[str, str]  # that every metric carries
    cache: dict[str, str]  # sizes of the KV cache, which are labels of a constant

    def text(self) -> str:
        return (generate_latest(self) + generate_latest(PROCESS)).decode()

    def collect(self) -> Iterator[Metric]:
        yield from self._plain(GaugeMetricFamily, GAUGES, self.numbers.gauges)
        yield from self._plain(CounterMetricFamily, COUNTERS, self.numbers.counters)
        for name, (text, _) in HISTOGRAMS.items():
            found = self.numbers.histograms[name]
            family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), found.buckets(), found.total)
            yield family
        facts, name = self.labels | self.cache, f"{self.prefix}:cache_config_info"
        text = "Always 1; its labels are the cache's sizes."
        info = GaugeMetricFamily(name, text, labels=list(facts))
        info.add_metric(list(facts.values()), 1.0)
        yield info

    def _plain(
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
ProcessCollector(registry=PROCESS)  # memory, processor time and open files, under their usual names
