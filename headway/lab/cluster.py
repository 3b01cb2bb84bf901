"""Several replicas on one virtual clock: colocated, or with prefill and decode in separate pools.

A disaggregated request has two parts: a prefill replica computes its prompt and samples the first
token, its keys and values travel to a decode replica, and that replica generates the other tokens.
A replica sends one request at a time. Arrived blocks are cached on the decode replica, where the
request finds them as a prefix: it computes the tokens of its last, incomplete block again. Blocks
that are reused before it is admitted are computed again as well. Not modelled: transfers that
overlap the prefill layer by layer or slow the devices down, several links, and n above 1.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from headway.config import Config
from headway.engine.engine import Observer
from headway.errors import ConfigError, InvalidRequest, PolicyError, RequestError
from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.fleet.router import Router
from headway.fleet.routing import RouteRule, format_route, prefix_load
from headway.lab.cost import Profile
from headway.lab.replica import SimulatedReplica
from headway.lab.simulate import Progress, as_simulated
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import WorkloadRequest
from headway.record.stats import RunStats, percentiles
from headway.record.timeline import RequestTimeline
from headway.request import Request
from headway.scheduler.validate import validate_request

LOADS = ("busy", "computed_tokens", "requests")  # whose balance is reported


@dataclass(slots=True)
class ReplicasResult:
    """The statistics of all replicas as one run, those of each pool, and the transfers."""

    metrics: RunStats
    pools: dict[str, dict[str, RunStats]]  # by pool and by replica
    transfers: list[tuple[int, float]]  # tokens, and seconds from the first token to the arrival
    rejected: list[tuple[str, str]]  # id and reason
    route: str

    def summary(self) -> Summary:
        """The summary of the run, with one entry for each pool and one for the transfers."""
        whole = summarize(self.metrics, len(self.rejected))
        tokens, seconds = [list(each) for each in zip(*self.transfers, strict=True)] or ([], [])
        return {
            **whole,
            "route": self.route,
            "pools": {
                name: _pool_summary(stats, whole["seconds"]) for name, stats in self.pools.items()
            },
            "transfers": {
                "requests": len(tokens), "tokens": sum(tokens), "seconds": percentiles(seconds)
            },
        }  # fmt: skip


def _pool_summary(replicas: dict[str, RunStats], seconds: float) -> Summary:
    one = summarize(_merged(list(replicas.values())))
    each = [_replica_summary(name, stats, seconds) for name, stats in replicas.items()]
    shown = ("steps", "preemptions", "recompute_tax", "cache_hit_ratio", "queue_time", "per_step")
    return {
        "replicas": len(replicas),
        "requests": one["requests"],
        "busy": sum(replica["busy"] for replica in each) / len(each),
        **{name: one[name] for name in shown},
        "balance": {name: balance([replica[name] for replica in each]) for name in LOADS},
        "each": each,
    }


def _replica_summary(name: str, stats: RunStats, seconds: float) -> Summary:
    """The values that are compared between replicas."""
    one = summarize(stats)
    shown = ("requests", "cache_hit_ratio", "preemptions", "ttft", "queue_time", "per_step")
    return {
        "name": name,
        "busy": sum(stats.steps["seconds"]) / seconds if seconds else 0.0,
        "computed_tokens": stats.totals["computed_tokens"],
        **{key: one[key] for key in shown},
    }


def balance(loads: Sequence[float]) -> float:
    """The largest load divided by the mean; 1 if no replica has any."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


class Pool:
    """Replicas that the same router chooses from."""

    def __init__(
        self,
        name: str,
        number: int,
        config: Config,
        profile: Profile,
        rule: RouteRule,
        async_scheduling: bool = False,
    ) -> None:
        self.name, self.config = name, as_simulated(config, profile, async_scheduling)
        self.router = Router(rule, config.block_size)
        common = self.router.tracker, self.config, profile, async_scheduling
        self.replicas = [SimulatedReplica(str(place), *common) for place in range(number)]
        self._changed = set(range(number))  # replicas whose load the router must read again
        self._steps: list[tuple[float, int]] = []  # their ends, and the replicas

    def choose(
        self, request: WorkloadRequest, now: float, num_prompt: int, keys: Sequence[bytes]
    ) -> tuple[SimulatedReplica, int]:
        """The replica for a request with this prompt, and the tokens of it to compute."""
        while self._steps and self._steps[0][0] <= now:
            self._changed.add(heapq.heappop(self._steps)[1])
        for place in sorted(self._changed):
            self.router.update(self.replicas[place].load(now))
        self._changed.clear()
        try:
            choice = self.router.choose(request.id, num_prompt, keys, request.client)
        except PolicyError as error:
            raise ConfigError(str(error)) from None
        assert choice is not None, "all replicas take requests"
        self._changed.add(int(choice.replica))
        return self.replicas[int(choice.replica)], choice.num_new

    def step(self, replica: SimulatedReplica) -> list[tuple[Request, float]]:
        """One step of a replica; the requests that ended with it, and when."""
        ended = replica.step()
        heapq.heappush(self._steps, (replica.clock.now(), int(replica.name)))
        return ended


class Cluster:
    """Pools of replicas, and the transfers between them; without decode pool, colocated."""

    def __init__(self, prefill: Pool, decode: Pool | None, profile: Profile) -> None:
        self._prefill, self._decode, self._profile = prefill, decode, profile
        pools = [prefill, decode] if decode else [prefill]
        self._replicas = [(pool, replica) for pool in pools for replica in pool.replicas]
        self._place = {replica: place for place, (_, replica) in enumerate(self._replicas)}
        self._busy: list[tuple[float, int]] = []  # a heap of clocks and places of busy replicas
        self._open: dict[str, WorkloadRequest] = {}  # in the prefill pool, with output to come
        self._arriving: list[tuple[float, int, WorkloadRequest]] = []  # at the decode pool
        self._order = count()
        self.transfers: list[tuple[int, float]] = []
        self.rejected: list[tuple[str, str]] = []

    def run(self, requests: Iterator[WorkloadRequest], progress: Progress | None) -> None:
        """Always advance what is earliest: an arrival, a transfer, or the replica behind the others."""
        coming = next(requests, None)
        while True:
            limit = self._busy[0][0] if self._busy else float("inf")
            arrives_at = self._arriving[0][0] if self._arriving else float("inf")
            if coming is not None and coming.arrival <= min(limit, arrives_at):
                self._submit(coming)
                coming = next(requests, None)
            elif self._arriving and arrives_at <= limit:
                self._receive(*heapq.heappop(self._arriving))
            elif self._busy:
                pool, behind = self._replicas[heapq.heappop(self._busy)[1]]
                for request, now in pool.step(behind):
                    if request.id in self._open:
                        self._send(behind, self._open.pop(request.id), now)
                    elif progress:
                        progress(1)
                self._await_step(behind)
            else:
                return

    def _add(
        self, replica: SimulatedReplica, request: WorkloadRequest, now: float, num_new: int
    ) -> None:
        was_idle = not replica.engine.has_work
        replica.add(request, now, num_new)
        if was_idle:
            self._await_step(replica)

    def _await_step(self, replica: SimulatedReplica) -> None:
        if replica.engine.has_work:
            heapq.heappush(self._busy, (replica.clock.now(), self._place[replica]))

    def _submit(self, request: WorkloadRequest) -> None:
        """To a prefill replica; with a decode pool, for its first token only."""
        prompt, first = request.request(), request
        keys = PromptKeys(prompt, self._prefill.config.block_size)
        replica, num_new = self._prefill.choose(request, request.arrival, prompt.num_prompt, keys)
        try:
            if self._decode:  # refused if the whole request could never run there
                if request.n > 1:
                    raise InvalidRequest(
                        f"request {request.id!r}: n must be 1 with separate pools, not {request.n}"
                    )
                validate_request(prompt, self._decode.config, ())
                first = replace(request, num_output=1, max_tokens=1)
            self._add(replica, first, request.arrival, num_new)
        except RequestError as error:
            self.rejected.append((request.id, str(error)))
        except PolicyError as error:
            raise ConfigError(str(error)) from None
        else:
            if self._decode and request.num_output > 1:
                self._open[request.id] = request

    def _send(self, source: SimulatedReplica, request: WorkloadRequest, now: float) -> None:
        source.link_free_at = max(now, source.link_free_at)
        source.link_free_at += self._profile.transfer_seconds(request.num_prompt)
        self.transfers.append((request.num_prompt, source.link_free_at - now))
        heapq.heappush(self._arriving, (source.link_free_at, next(self._order), request))

    def _receive(self, now: float, _: int, request: WorkloadRequest) -> None:
        """The prompt is in the cache of a decode replica; the first token is part of it there."""
        assert self._decode, "only a prefill pool sends"
        replica, num_new = self._decode.choose(request, now, 1, [])
        first_token = array("i", [request.params().sampling.filler])  # type: ignore[union-attr]
        rest = replace(
            request, pieces=(*request.pieces, first_token), num_output=request.num_output - 1,
            max_tokens=request.max_tokens - 1,
        )  # fmt: skip
        replica.engine.scheduler.kv.import_prefix(request.request())
        self._add(replica, rest, now, num_new)


def simulate_replicas(
    requests: Iterable[WorkloadRequest],
    config: Config,
    profile: Profile,
    num_replicas: int,
    *,
    route: RouteRule = prefix_load,
    decode: tuple[Config, int] | None = None,
    async_scheduling: bool = False,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
) -> ReplicasResult:
    """Run all requests on some replicas; with `decode`, a config and a number, on two pools.

    `observers` are one for each of the first replicas, such as writers of their traces.
    """
    common, name = (profile, route, async_scheduling), "prefill" if decode else "colocated"
    first = Pool(name, num_replicas, config, *common)
    second = Pool("decode", decode[1], decode[0], *common) if decode else None
    for replica, observer in zip(first.replicas, observers, strict=False):
        replica.engine.observers.append(observer)
    cluster = Cluster(first, second, profile)
    cluster.run(iter(requests), progress)
    pools = {
        each.name: {replica.name: replica.metrics for replica in each.replicas}
        for each in (first, second) if each
    }  # fmt: skip
    stats = [list(each.values()) for each in pools.values()]
    metrics = _merged(stats[0]) if not decode else _joined(*stats)
    return ReplicasResult(metrics, pools, cluster.transfers, cluster.rejected, format_route(route))


def _merged(replicas: list[RunStats]) -> RunStats:
    merged = RunStats(replicas[0].header)
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
