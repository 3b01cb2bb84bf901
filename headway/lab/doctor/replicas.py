"""The doctor for several replicas: problems that the summary of one engine cannot show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from headway.lab.doctor.diagnose import Finding, diagnose
from headway.lab.summary import Summary

MAX_BALANCE = 1.25  # largest load of a replica divided by the mean
MIN_BUSY = 0.2  # of the busiest replica; uneven load matters only where there is some
HOT = 4.0  # times the median of the queue times
MIN_QUEUE = 0.5  # seconds; shorter queue times are no problem
COLD = 0.5  # of the mean hit ratio
MIN_HITS = 0.1  # mean hit ratio; below, no replica's cache is worth much
MIN_SHARED = 20  # requests; a replica with fewer has hardly had a chance to hit


def diagnose_replicas(summary: Summary, config: Mapping[str, str | int]) -> list[Finding]:
    """Problems between the replicas of each pool, then those of the run as a whole."""
    pools = [pool["each"] for pool in summary["pools"].values() if pool["replicas"] > 1]
    checks, route = (_hot_spot, _imbalance, _cold), summary["route"]
    found = (check(replicas, route) for replicas in pools for check in checks)
    return [*filter(None, found), *diagnose(summary, config)]


def _hot_spot(replicas: Sequence[Summary], route: str) -> Finding | None:
    """One replica queues requests while the others have nearly no queue."""
    times = [each["queue_time"]["p90"] for each in replicas]
    hottest, usual = max(times), median(times)
    if hottest < max(MIN_QUEUE, HOT * usual):
        return None
    hot = replicas[times.index(hottest)]
    share = hot["requests"] / max(1, sum(each["requests"] for each in replicas))
    return _finding(
        route,
        f"hot spot: p90 of the queue time is {hottest:.1f} s on replica {hot['name']} and "
        f"{usual:.1f} s on the median replica; it has {share:.0%} of the requests",
        "requests with a popular prefix follow its cache to one replica, or one replica has the "
        "longest prompts",
        "a rule that weighs hits against load",
    )


def _imbalance(replicas: Sequence[Summary], route: str) -> Finding | None:
    """The busiest replica works much longer than the mean."""
    busy = [each["busy"] for each in replicas]
    most, usual = max(busy), mean(busy)
    if most < MIN_BUSY or most <= MAX_BALANCE * usual:
        return None
    first, last = replicas[busy.index(most)], replicas[busy.index(min(busy))]
    return _finding(
        route,
        f"imbalance: replica {first['name']} is busy {most:.0%} of the time, replica "
        f"{last['name']} {min(busy):.0%}; the largest is {most / usual:.2f} times the mean "
        f"(limit {MAX_BALANCE:g})",
        "the routing rule does not count the work that it sends",
        "a rule that counts the tokens to compute",
    )


def _cold(replicas: Sequence[Summary], route: str) -> Finding | None:
    """One replica hits much less than the others."""
    ratios = [each["cache_hit_ratio"] for each in replicas]
    usual, least = mean(ratios), min(ratios)
    cold = replicas[ratios.index(least)]
    if usual < MIN_HITS or least >= COLD * usual or cold["requests"] < MIN_SHARED:
        return None
    return _finding(
        route,
        f"cold replica: {least:.0%} of the prompt tokens hit on replica {cold['name']}, "
        f"{usual:.0%} on average",
        "it gets requests whose prefixes other replicas hold",
        "a rule that reads the caches",
    )


def _finding(route: str, symptom: str, cause: str, better: str) -> Finding:
    """The remedy is the default rule, which is `better`; none if that is used already."""
    if route == "prefix_load":
        remedy = "add replicas: the default rule already weighs hits against load"
        return Finding(symptom, cause, remedy)
    return Finding(symptom, cause, f"use {better}: --route prefix_load", ("route=prefix_load",))
