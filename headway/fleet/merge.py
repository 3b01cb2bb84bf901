"""One answer from the answers of all replicas: metrics, and the snapshot of the live page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Snapshot = dict[str, Any]
NOT_SUMMED = ("kv_cache_usage_perc", "snapshot_age_seconds", "cache_config_info")
SUMMED_RATES = ("output_tokens", "prompt_tokens", "requests", "preemptions", "steps")
SUMMED_MINUTE = ("errors", "aborts", "preemptions_per_second")
MAX_ROWS = 64  # of requests
MAX_DECISIONS = 32
FLEET_TEXTS = {
    "replicas": "Replicas that take requests.",
    "moves": "Requests that continued on another replica.",
    "deaths": "Replicas that were lost or did not respond.",
    "drains": "Replicas whose requests were moved before they stopped.",
    "resumed_tokens": "Tokens that moved requests had already generated.",
    "resume_seconds": "Seconds from sending moved requests to their next tokens, added up.",
    "failed": "Requests that no replica could continue.",
    "frames": "Messages received from replicas, each with the tokens of all requests of a step.",
}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_metrics(texts: Mapping[str, str], fleet: Mapping[str, float]) -> str:
    """Metrics of all replicas with the label `replica`, and their sums.

    The sum of `headway:x` is `headway_fleet:x`. The names differ, so that a query that adds up all
    replicas counts nothing twice. `fleet` has the values of FLEET_TEXTS.
    """
    families: dict[str, Metric] = {}
    sums: dict[str, Counter[tuple[str, tuple[tuple[str, str], ...]]]] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            total = sums.setdefault(family.name, Counter())
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
                total[sample.name, tuple(sample.labels.items())] += sample.value  # type: ignore[assignment]
    named = [name.partition(":") for name in families if ":" in name]
    summed = [
        _summed(families[f"{prefix}:{name}"], sums[f"{prefix}:{name}"], prefix)
        for prefix, _, name in named
        if name not in NOT_SUMMED
    ]
    every = chain(families.values(), summed, _fleet_families(named[0][0], fleet))
    return generate_latest(_Families(every)).decode()


def _summed(family: Metric, total: Mapping[Any, float], prefix: str) -> Metric:
    def renamed(name: str) -> str:
        return name.replace(f"{prefix}:", f"{prefix}_fleet:", 1)

    found = Metric(
        renamed(family.name), f"{family.documentation} Sum of all replicas.", family.type
    )
    for (name, labels), value in total.items():
        found.add_sample(renamed(name), dict(labels), value)
    return found


def _fleet_families(prefix: str, fleet: Mapping[str, float]) -> Iterator[Metric]:
    for name, text in FLEET_TEXTS.items():
        kind = "gauge" if name == "replicas" else "counter"
        found = Metric(f"{prefix}_fleet:{name}", text, kind)
        ending = "" if kind == "gauge" else "_total"
        found.add_sample(f"{prefix}_fleet:{name}{ending}", {}, fleet.get(name, 0))
        yield found


def merge_snapshots(found: Mapping[str, Snapshot]) -> Snapshot:
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


def _row(name: str, s: Snapshot) -> dict[str, Any]:
    return {
        "name": name, "running": s["running"]["count"], "limit": s["running"]["limit"],
        "waiting": s["waiting"]["count"], "blocks_used": s["kv_blocks"]["used"],
        "blocks_total": s["kv_blocks"]["total"], "output_tokens": s["rates"]["output_tokens"],
        "cache_hit_rate": s["last_minute"]["prefix_cache_hit_rate"],
        "requests": s["totals"]["requests"], "uptime": s["uptime"], "fault": s["fault"],
    }  # fmt: skip


def _requests(found: Mapping[str, Snapshot], part: str, counts: Sequence[str]) -> dict[str, Any]:
    rows = zip_longest(*(s[part]["requests"] for s in found.values()))
    listed = (
        {**row, "replica": name}
        for each in rows
        for name, row in zip(found, each, strict=True)
        if row is not None
    )
    sums = {name: sum(s[part][name] for s in found.values()) for name in counts}
    return {**sums, "requests": list(islice(listed, MAX_ROWS))}


def _rates(all: Sequence[Snapshot]) -> dict[str, float]:
    rates = {name: sum(s["rates"][name] for s in all) for name in SUMMED_RATES}
    for name in ("ttft", "itl"):
        pairs = [(s["rates"][name] or None, s["rates"]["output_tokens"]) for s in all]
        rates[name] = _mean(pairs) or 0.0
    return rates


def _history(all: Sequence[Snapshot]) -> dict[str, list[float | None]]:
    columns = [s["history"] for s in all]
    tokens = list(zip(*(c["output_tokens"] for c in columns), strict=True))
    history: dict[str, list[float | None]] = {
        "output_tokens": [sum(second) for second in tokens],
        "max_itl": [
            _largest(second) for second in zip(*(c["max_itl"] for c in columns), strict=True)
        ],
    }
    for name in ("ttft", "itl"):
        seconds = zip(zip(*(c[name] for c in columns), strict=True), tokens, strict=True)
        history[name] = [_mean(list(zip(*pair, strict=True))) for pair in seconds]
    return history


def _minute(all: Sequence[Snapshot]) -> dict[str, float | None]:
    minute: dict[str, float | None] = {}
    for name in all[0]["last_minute"]:
        values = [s["last_minute"][name] for s in all]
        if name in SUMMED_MINUTE:
            minute[name] = sum(values)
        elif name == "max_itl":
            minute[name] = _largest(values)
        else:
            minute[name] = _mean(
                [(v, s["rates"]["steps"]) for v, s in zip(values, all, strict=True)]
            )
    return minute


def _mean(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """The mean of the known values by weight; without any weight all count the same."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    if not known:
        return None
    if not total:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _worst(vitals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The vital of the replica that is unhealthy, or has the largest value."""
    return max(vitals, key=lambda v: (not v["is_healthy"], v["value"] or 0.0))


def _decisions(found: Mapping[str, Snapshot]) -> Iterator[dict[str, Any]]:
    """The latest decisions of all replicas, an equal number of each, oldest first."""
    share = max(1, MAX_DECISIONS // len(found))
    for each in zip_longest(*(s["decisions"][-share:] for s in found.values())):
        for name, decision in zip(found, each, strict=True):
            if decision is not None:
                yield {**decision, "text": f"[{name}] {decision['text']}"}
