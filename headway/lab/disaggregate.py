"""Several replicas on a virtual clock: colocated, or with prefill and decode in separate pools.

A disaggregated request has two parts: a prefill replica computes its prompt and samples the first
token, its keys and values travel to a decode replica, and that replica generates the other tokens. Every replica is an engine with its own scheduler, KV cache and clock. The router sends a
request to the replica with the fewest prompt tokens in its open requests.

A transfer takes `Profile.transfer_seconds` of all prompt tokens; a replica sends one request at a
time. Arrived blocks are cached on the decode replica, where the request finds them as a prefix: it
computes the tokens of its last, incomplete block again, at most one block. Blocks that are reused
before it is admitted are computed again as well. Not modelled: transfers that overlap the prefill
layer by layer, transfers that slow the devices down, several links, and requests with n above 1.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from headway.config import Config
from headway.errors import ConfigError, InvalidRequest, PolicyError, RequestError
from headway.lab.cost import Profile
from headway.lab.simulate import Progress, SimulatedEngine, with_profile
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import WorkloadRequest
from headway.observe.run_stats import RunStats, percentiles
from headway.observe.timeline import RequestTimeline
from headway.plan import StepReport
from headway.request import Request
from headway.scheduler.validate import validate_request


@dataclass(slots=True)
class ReplicasResult:
    """The statistics of all replicas as one run, those of each pool, and the transfers."""

    metrics: RunStats
    pools: dict[str, list[RunStats]]
    transfers: list[tuple[int, float]]  # tokens, and seconds from the first token to the arrival
    rejected: list[tuple[str, str]] = field(default_factory=list)  # id and reason

    def summary(self) -> Summary:
        """The summary of the run, with one entry for each pool and one for the transfers."""
        whole = summarize(self.metrics, len(self.rejected))
        tokens, seconds = [list(each) for each in zip(*self.transfers, strict=True)] or ([], [])
        return {
            **whole,
            "pools": {
                name: _pool_summary(stats, whole["seconds"]) for name, stats in self.pools.items()
            },
            "transfers": {
                "requests": len(tokens), "tokens": sum(tokens), "seconds": percentiles(seconds),
            },
        }  # fmt: skip


def _pool_summary(replicas: list[RunStats], seconds: float) -> Summary:
    merged = _merged(replicas)
    one = summarize(merged)
    busy = sum(sum(stats.steps["seconds"]) for stats in replicas)
    shown = ("steps", "preemptions", "recompute_tax", "cache_hit_ratio", "queue_time", "per_step")
    return {
        "replicas": len(replicas),
        "requests": one["requests"],
        "busy": busy / (seconds * len(replicas)) if seconds else 0.0,
        **{name: one[name] for name in shown},
    }


class Replica(SimulatedEngine):
    """One engine, and what the router needs to know about it."""

    def __init__(self, config: Config, profile: Profile, async_scheduling: bool) -> None:
        super().__init__(config, profile, async_scheduling)
        self.num_open_tokens = 0  # of prompts
        self.link_free_at = 0.0
        self.ended: list[tuple[Request, float]] = []  # in the latest step
        self.engine.observers.append(self._observe)

    def _observe(self, report: StepReport) -> None:
        for request in report.finished:
            self.num_open_tokens -= request.num_prompt
            self.ended.append((request, report.result.ended))

    def add(self, request: WorkloadRequest, now: float) -> None:
        """Queue a request that arrives now; RequestError if it can never run."""
        self.clock.advance_to(now)  # an idle replica; a busy one is never behind
        self.engine.add(request.id, request.prompt(), request.params(), now)
        self.num_open_tokens += request.num_prompt

    def step(self) -> list[tuple[Request, float]]:
        """One step; the requests that ended with it, and when."""
        self.ended = []
        self.engine.step()
        if self.engine.fault:  # only a user's policy can fail here
            raise ConfigError(f"the simulation failed: {self.engine.fault}")
        return self.ended


class Cluster:
    """Replicas, a router, and the transfers between the pools; without decode pool, colocated."""

    def __init__(self, prefill: list[Replica], decode: list[Replica], profile: Profile) -> None:
        self._prefill, self._decode, self._profile = prefill, decode, profile
        self._open: dict[str, WorkloadRequest] = {}  # in the prefill pool, with output to come
        self._arriving: list[tuple[float, int, WorkloadRequest]] = []  # at the decode pool
        self._order = count()
        self.transfers: list[tuple[int, float]] = []
        self.rejected: list[tuple[str, str]] = []

    def run(self, requests: Iterator[WorkloadRequest], progress: Progress | None) -> None:
        """Always advance what is earliest: an arrival, a transfer, or the replica behind the others."""
        coming, replicas = next(requests, None), [*self._prefill, *self._decode]
        while True:
            busy = [replica for replica in replicas if replica.engine.has_work]
            behind = min(busy, key=lambda replica: replica.clock.now(), default=None)
            limit = behind.clock.now() if behind else float("inf")
            arrives_at = self._arriving[0][0] if self._arriving else float("inf")
            if coming is not None and coming.arrival <= min(limit, arrives_at):
                self._submit(coming)
                coming = next(requests, None)
            elif self._arriving and arrives_at <= limit:
                self._receive(*heapq.heappop(self._arriving))
            elif behind:
                for request, now in behind.step():
                    is_sent = request.id in self._open
                    if is_sent:
                        self._send(behind, self._open.pop(request.id), now)
                    elif progress:
                        progress(1)
            else:
                return

    def _submit(self, request: WorkloadRequest) -> None:
        """To a prefill replica; with a decode pool, for its first token only."""
        replica = min(self._prefill, key=lambda each: each.num_open_tokens)
        first = request
        try:
            if self._decode:
                _check(request, self._decode[0].config)
                first = replace(request, num_output=1, max_tokens=1)
            replica.add(first, request.arrival)
        except RequestError as error:
            self.rejected.append((request.id, str(error)))
        except PolicyError as error:
            raise ConfigError(str(error)) from None
        else:
            if self._decode and request.num_output > 1:
                self._open[request.id] = request

    def _send(self, source: Replica, request: WorkloadRequest, now: float) -> None:
        source.link_free_at = max(now, source.link_free_at)
        source.link_free_at += self._profile.transfer_seconds(request.num_prompt)
        self.transfers.append((request.num_prompt, source.link_free_at - now))
        heapq.heappush(self._arriving, (source.link_free_at, next(self._order), request))

    def _receive(self, now: float, _: int, request: WorkloadRequest) -> None:
        """The prompt is in the cache of a decode replica; the first token is part of it there."""
        replica = min(self._decode, key=lambda each: each.num_open_tokens)
        first_token = array("i", [request.params().sampling.filler])  # type: ignore[attr-defined]
        rest = replace(
            request, pieces=(*request.pieces, first_token), num_output=request.num_output - 1,
            max_tokens=request.max_tokens - 1,
        )  # fmt: skip
        replica.engine.scheduler.kv.import_prefix(request.request())
        replica.add(rest, now)


def _check(request: WorkloadRequest, config: Config) -> None:
    """RequestError if the whole request could never run on a decode replica."""
    if request.n > 1:
        raise InvalidRequest(
            f"request {request.id!r}: n must be 1 with separate pools, not {request.n}"
        )
    validate_request(request.request(), config, ())


def simulate_replicas(
    requests: Iterable[WorkloadRequest],
    config: Config,
    profile: Profile,
    num_replicas: int,
    *,
    decode: tuple[Config, int] | None = None,
    async_scheduling: bool = False,
    progress: Progress | None = None,
) -> ReplicasResult:
    """Run all requests on some replicas; with `decode`, a config and a number, on two pools."""

    def pool(config: Config, number: int) -> list[Replica]:
        config = with_profile(config, profile)
        return [Replica(config, profile, async_scheduling) for _ in range(number)]

    first, second = pool(config, num_replicas), pool(*decode) if decode else []
    cluster = Cluster(first, second, profile)
    cluster.run(iter(requests), progress)
    pools = {"prefill": first, "decode": second} if decode else {"colocated": first}
    stats = {name: [replica.metrics for replica in each] for name, each in pools.items()}
    metrics = _merged(stats["colocated"]) if not decode else _joined(**stats)
    return ReplicasResult(metrics, stats, cluster.transfers, cluster.rejected)


def _merged(replicas: list[RunStats]) -> RunStats:
    merged = RunStats({"config": replicas[0].config})
    for stats in replicas:
        merged.merge(stats)
    merged.requests.sort(key=lambda times: times.arrival)
    return merged


def _joined(prefill: list[RunStats], decode: list[RunStats]) -> RunStats:
    """Both pools as one run: a request is one timeline, from its arrival to its last token."""
    first, second = _merged(prefill), _merged(decode)
    joined, later = _merged([first, second]), {times.id: times for times in second.requests}
    for name in ("prompt_tokens", "cached_tokens"):
        joined.totals[name] = first.totals[name]
    joined.totals["finished_length"] -= len(later)
    joined.requests = []
    for times in first.requests:
        rest = later.get(times.id)
        joined.requests.append(_continued(times, rest) if rest else times)
        if rest and rest.first_token >= 0:
            joined.add_gap(rest.first_token - times.first_token)
    return joined


def _continued(first: RequestTimeline, rest: RequestTimeline) -> RequestTimeline:
    """One timeline of both parts; the wait between them is a time between tokens."""
    return replace(
        first, finished=rest.finished, finish_reason=rest.finish_reason,
        num_output=first.num_output + rest.num_output,
        num_recomputed=first.num_recomputed + rest.num_recomputed,
        longest_stall=max(rest.longest_stall, rest.first_token - first.first_token),
    )  # fmt: skip
