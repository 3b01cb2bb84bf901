"""One answer from the answers of all replicas: metrics, and the snapshot of the live page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headway.engine.queries import Document

Labels = tuple[tuple[str, str], ...]
NOT_SUMMED = ("kv_cache_usage_perc", "snapshot_age_seconds", "cache_config_info")
SUMMED_RATES = ("output_tokens", "prompt_tokens", "requests", "preemptions", "steps")
MAX_ROWS = 64  # of requests
MAX_DECISIONS = 32
GAUGES = ("replicas", "starting", "directory_ok")
FLEET_TEXTS = {
    "replicas": "Replicas that take requests.",
    "starting": "Replicas that are being started.",
    "directory_ok": "1 if the list of replicas is up to date.",
    "moves": "Requests that continued on another replica.",
    "deaths": "Replicas that were lost or did not respond.",
    "drains": "Replicas whose requests were moved before they stopped.",
    "resumed_tokens": "Tokens that moved requests had already generated.",
    "resume_seconds": "Seconds from sending moved requests to their next tokens, added up.",
    "isolated": "Requests that ran alone on a replica after several losses.",
    "failed": "Requests that no replica could continue.",
    "frames": "Messages received from replicas, each with the tokens of all requests of a step.",
}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_metrics(texts: Mapping[str, str], fleet: Mapping[str, float], prefix: str) -> str:
    """Metrics of all replicas with the label `replica`, and their sums.

    The sum of `headway:x` is `headway_fleet:x`. The names differ, so that a query that adds up all
    replicas counts nothing twice. `fleet` has the values of FLEET_TEXTS, whose names begin
    with `prefix`. Without a replica these are all.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    own = {name.partition(":"): family for name, family in families.items() if ":" in name}
    summed = [_summed(family) for (*_, name), family in own.items() if name not in NOT_SUMMED]
    every = chain(families.values(), summed, _fleet_families(prefix, fleet))
    return generate_latest(_Families(every)).decode()


def _summed(family: Metric) -> Metric:
    total: dict[tuple[str, Labels], float] = defaultdict(float)
    for sample in family.samples:
        labels = tuple((key, value) for key, value in sample.labels.items() if key != "replica")
        total[sample.name.replace(":", "_fleet:", 1), labels] += sample.value
    text = f"{family.documentation} Sum of all replicas."
    found = Metric(family.name.replace(":", "_fleet:", 1), text, family.type)
    for (name, labels), value in total.items():
        found.add_sample(name, dict(labels), value)
    return found


def _fleet_families(prefix: str, fleet: Mapping[str, float]) -> Iterator[Metric]:
    for name, text in FLEET_TEXTS.items():
        family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
        yield family(f"{prefix}_fleet:{name}", text, value=fleet.get(name, 0))


def merge_snapshots(found: Mapping[str, Document]) -> Document:
    """A snapshot of the whole fleet, with one row for each replica under `replicas`.

    Counts and rates are sums, latencies are means by tokens, stalls are maxima. At least one
    replica must be given.
    """
    all = list(found.values())
    faults = [f"replica {name}: {s['fault']}" for name, s in found.items() if s["fault"]]
    return {
        "model": all[0]["model"], "version": all[0]["version"],
        "uptime": max(s["uptime"] for s in all), "age": max(s["age"] for s in all),
        "step": sum(max(0, s["step"]) for s in all),
        "step_seconds": _largest(s["step_seconds"] for s in all),
        "fault": "; ".join(faults) or None,
        "why": "\n".join(f"replica {name}: {s['why']}" for name, s in found.items()),
        "running": _requests(found, "running", ("count", "limit")),
        "waiting": _requests(found, "waiting", ("count", "new", "swapped")),
        "kv_blocks": {
            name: value if name == "block_size" else sum(s["kv_blocks"][name] for s in all)
            for name, value in all[0]["kv_blocks"].items()
        },
        "rates": _rates(all), "history": _history(all), "last_minute": _minute(all),
        "totals": {name: sum(s["totals"][name] for s in all) for name in all[0]["totals"]},
        "vitals": [_worst(each) for each in zip(*(s["vitals"] for s in all), strict=True)],
        "decisions": list(_decisions(found)),
        "replicas": [_row(name, s) for name, s in found.items()],
    }  # fmt: skip


def _row(name: str, s: Document) -> Document:
    return {
        "name": name, "running": s["running"]["count"], "limit": s["running"]["limit"],
        "waiting": s["waiting"]["count"], "blocks_used": s["kv_blocks"]["used"],
        "blocks_total": s["kv_blocks"]["total"], "output_tokens": s["rates"]["output_tokens"],
        "cache_hit_rate": s["last_minute"]["prefix_cache_hit_rate"],
        "requests": s["totals"]["requests"], "uptime": s["uptime"], "fault": s["fault"],
    }  # fmt: skip


def _requests(found: Mapping[str, Document], part: str, counts: Sequence[str]) -> Document:
    rows = _in_turn(found, [s[part]["requests"] for s in found.values()])
    sums = {name: sum(s[part][name] for s in found.values()) for name in counts}
    listed = [{**row, "replica": name} for name, row in islice(rows, MAX_ROWS)]
    return {**sums, "requests": listed}


def _rates(all: Sequence[Document]) -> dict[str, float]:
    columns = {name: [s["rates"][name] for s in all] for name in all[0]["rates"]}
    rates = {name: sum(columns[name]) for name in SUMMED_RATES}
    for name in ("ttft", "itl"):
        known = [value or None for value in columns[name]]
        rates[name] = _mean(known, columns["output_tokens"]) or 0.0
    return rates


def _history(all: Sequence[Document]) -> dict[str, list[float | None]]:
    tokens, longest, ttft, itl = (
        list(zip(*(s["history"][name] for s in all), strict=True))
        for name in ("output_tokens", "max_itl", "ttft", "itl")
    )
    return {
        "output_tokens": list(map(sum, tokens)),
        "max_itl": list(map(_largest, longest)),
        "ttft": list(map(_mean, ttft, tokens)),
        "itl": list(map(_mean, itl, tokens)),
    }


def _minute(all: Sequence[Document]) -> dict[str, float | None]:
    mean = partial(_mean, weights=[s["rates"]["steps"] for s in all])
    return {
        name: COMBINE_MINUTE.get(name, mean)([s["last_minute"][name] for s in all])
        for name in all[0]["last_minute"]
    }


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The mean of the known values by weight; without any weight all count the same."""
    known = [(v, weight) for v, weight in zip(values, weights, strict=True) if v is not None]
    if not known:
        return None
    if not any(weight for _, weight in known):
        known = [(value, 1) for value, _ in known]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


COMBINE_MINUTE: dict[str, Callable[[list[Any]], float | None]] = {
    "errors": sum, "aborts": sum, "preemptions_per_second": sum, "max_itl": _largest,
}  # fmt: skip  # others are means by steps


def _worst(vitals: Sequence[Document]) -> Document:
    """The vital of the replica that is unhealthy, or has the largest value."""
    return max(vitals, key=lambda v: (not v["is_healthy"], v["value"] or 0.0))


def _decisions(found: Mapping[str, Document]) -> Iterator[Document]:
    """The latest decisions of all replicas, an equal number of each, oldest first."""
    share = max(1, MAX_DECISIONS // len(found))
    for name, decision in _in_turn(found, [s["decisions"][-share:] for s in found.values()]):
        yield {**decision, "text": f"[{name}] {decision['text']}"}


def _in_turn(
    names: Iterable[str], lists: Iterable[list[Document]]
) -> Iterator[tuple[str, Document]]:
    """The first item of each list, then the second ones, each with its name."""
    for each in zip_longest(*lists):
        yield from ((name, item) for name, item in zip(names, each, strict=True) if item)
