"""Workloads of the planner: requests by seed, part and rate, the same every time.

A seed changes what is drawn and nothing else, so runs of two settings with one seed differ by the
settings alone (common random numbers). Seed 0 is the workload as given. Other seeds of a synthetic
workload add to its own seed. Other seeds of a file keep the arrival times and rotate the requests
against them, so lengths, their order and shared prefixes stay as recorded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

from headway.errors import ConfigError
from headway.lab.workload.files import adjust, is_synthetic, load_workload, move
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The text of a workload and how its requests are selected; see `headway simulate`."""

    text: str
    limit: int | None = None
    speed: float = 1.0
    allowed_tokens: int | None = None
    accept: str | None = None  # of requests whose file has none

    def requests(self, seed: int = 0) -> list[WorkloadRequest]:
        """All requests of a seed; ConfigError or FormatError if the workload is invalid."""
        return _requests(self, seed)

    @property
    def has_drafts(self) -> bool:
        """Whether it says of some requests how often drafts of their tokens are right."""
        return any(request.accept is not None for request in self.requests())

    def fingerprint(self) -> str:
        """Identifies the content: the text, or the hash of a file; FormatError if it is invalid."""
        self.requests()
        content = self.text
        if not is_synthetic(self.text):
            content = hashlib.sha256(Path(self.text).read_bytes()).hexdigest()
        return f"{content}|{self.limit}|{self.speed!r}|{self.allowed_tokens}|{self.accept}"


@lru_cache(maxsize=8)
def _requests(workload: Workload, seed: int) -> list[WorkloadRequest]:
    text, limit, speed = workload.text, workload.limit, workload.speed
    is_plain = workload.allowed_tokens is None and workload.accept is None  # these are for files
    if is_synthetic(text) and is_plain and seed:
        synthetic = parse_synthetic(text)
        return adjust(replace(synthetic, seed=synthetic.seed + seed).generate(), limit, speed)
    requests = load_workload(text, limit, speed, workload.allowed_tokens, workload.accept)
    return _rotated(requests, seed) if seed else requests


def _rotated(requests: list[WorkloadRequest], seed: int) -> list[WorkloadRequest]:
    start = Random(f"{seed} rotation").randint(1, max(1, len(requests) - 1))
    bodies = requests[start:] + requests[:start]
    return [move(body, slot.arrival) for body, slot in zip(bodies, requests, strict=True)]


def part(requests: Sequence[WorkloadRequest], share: float) -> list[WorkloadRequest]:
    """The first requests, at least one."""
    return list(requests[: max(1, math.ceil(share * len(requests)))])


def rate_of(requests: Sequence[WorkloadRequest]) -> float:
    """Requests per second over the time of arrivals; infinite if all arrive at once."""
    seconds = requests[-1].arrival - requests[0].arrival
    return (len(requests) - 1) / seconds if seconds > 0 else math.inf


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """The same requests with arrival times stretched to this mean rate; infinite: all at once."""
    now = rate_of(requests)
    if math.isinf(now) and not math.isinf(rate):
        if len(requests) == 1:
            raise ConfigError("the workload has one request and so no rate; give it more requests")
        raise ConfigError(
            "the workload has no arrival process: its requests arrive at once; give it arrivals, "
            "e.g. arrivals=poisson(1)"
        )
    return [move(request, request.arrival * now / rate if rate < math.inf else 0.0)
            for request in requests]  # fmt: skip
