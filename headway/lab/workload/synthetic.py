"""Synthetic workloads: arrivals, lengths, shared prefixes and clients drawn from distributions.

docs/simulator.md describes the fields of their text form, which are all optional. A length below 1
is 1. Every field has its own random stream: changing one does not change what the others draw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from random import Random
from typing import Any

from headway.checks import real_number, whole_number
from headway.errors import ConfigError
from headway.executor.simulated import Acceptance
from headway.lab.workload.acceptance import independent, read_acceptance
from headway.lab.workload.request import MAX_TOKENS, Pieces, TokenSpace, WorkloadRequest, join

Distribution = Callable[[Random], float]
Weights = Callable[[int], list[float]]  # of that number of clients
AcceptanceOf = Callable[[Random, int], Acceptance]  # of one request, with the seed of the workload


def fixed(value: float) -> Distribution:
    return lambda _: value


def uniform(low: float, high: float) -> Distribution:
    if not low <= high:
        raise ConfigError(f"uniform({low},{high}): the first number must not exceed the second")
    if isinstance(low, int) and isinstance(high, int):
        return lambda random: random.randint(low, high)
    return lambda random: random.uniform(low, high)


def lognormal(mean: float, sigma: float, low: float = 1, high: float = 32_768) -> Distribution:
    """`mean` is the mean of the whole distribution, before it is clipped to [low, high]."""
    real_number("mean of lognormal", mean, above=0)
    real_number("sigma of lognormal", sigma, low=0, high=10)
    if low > high:
        raise ConfigError(f"lognormal: the lower limit {low} exceeds the upper limit {high}")
    centre = math.log(mean) - sigma * sigma / 2
    return lambda random: min(max(random.lognormvariate(centre, sigma), low), high)


def mix(parts: list[tuple[float, Distribution]]) -> Distribution:
    weights = [real_number("the weight of a part", weight, above=0) for weight, _ in parts]
    return lambda random: random.choices(parts, weights)[0][1](random)


def poisson(rate: float) -> Distribution:
    """Gaps between arrivals, in seconds, as for `steady` and `bursty`."""
    real_number("rate", rate, above=0)
    return lambda random: random.expovariate(rate)


def steady(rate: float) -> Distribution:
    return fixed(1 / real_number("rate", rate, above=0))


def bursty(rate: float, cv: float) -> Distribution:
    """Gamma gaps with a coefficient of variation: 1 is Poisson, more is burstier."""
    shape, mean = real_number("cv", cv, above=0) ** -2, 1 / real_number("rate", rate, above=0)
    return lambda random: random.gammavariate(shape, mean / shape)


def zipf(exponent: float) -> Weights:
    return lambda clients: [(place + 1) ** -exponent for place in range(clients)]


def heavy(share: float) -> Weights:
    """The first client sends `share` of the requests, the others the rest in equal parts."""
    if not 0 < share < 1:
        raise ConfigError(f"the share of heavy must be above 0 and below 1, not {share}")
    return lambda clients: [share] + [(1 - share) / max(1, clients - 1)] * (clients - 1)


AT_ONCE, PROMPT, OUTPUT, EVEN = fixed(0), fixed(512), fixed(128), zipf(0)


@dataclass(frozen=True)
class Prefixes:
    """`count` prefixes of `tokens` each; a request has one with probability `share`."""

    count: int = 0
    tokens: int = 0
    share: float = 1.0


LIMITS = {
    "requests": 10_000_000, "max_tokens": MAX_TOKENS, "clients": 1_000_000,
    "priorities": 1_000_000, "n": 1024,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A description of a workload; `generate` makes its requests, the same every time."""

    requests: int = 256
    arrivals: Distribution = AT_ONCE
    prompt: Distribution = PROMPT
    output: Distribution = OUTPUT
    max_tokens: int | None = None
    prefix: Prefixes = Prefixes()
    clients: int = 1
    skew: Weights = EVEN
    priorities: int = 1
    slack: Distribution | None = None
    n: int = 1
    accept: AcceptanceOf | None = None  # None: all drafts are wrong
    seed: int = 0

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, 1, limit)

    def generate(self) -> list[WorkloadRequest]:
        """The requests in order of arrival; the first one arrives at 0."""
        space = TokenSpace()
        random = {field.name: Random(f"{self.seed} {field.name}") for field in fields(self)}
        weights, names = self.skew(self.clients), [f"client-{i}" for i in range(self.clients)]
        requests: list[WorkloadRequest] = []
        arrival = 0.0
        for place in range(self.requests):
            output = min(_length(self.output(random["output"])), self.max_tokens or MAX_TOKENS)
            client = random["clients"].choices(names, weights)[0]
            slack = self.slack(random["slack"]) if self.slack else None
            accept = self.accept(random["accept"], self.seed) if self.accept else None
            requests.append(WorkloadRequest(
                id=str(place), arrival=arrival, pieces=self._pieces(random, space),
                num_output=output, max_tokens=self.max_tokens or output,
                client=client if self.clients > 1 else "", n=self.n,
                priority=random["priorities"].randrange(self.priorities),
                deadline=None if slack is None else arrival + slack, accept=accept,
            ))  # fmt: skip
            arrival += max(0.0, self.arrivals(random["arrivals"]))
        return requests

    def _pieces(self, random: dict[str, Random], space: TokenSpace) -> Pieces:
        own = space.take(_length(self.prompt(random["prompt"])))
        if not self.prefix.count:
            return (own,)
        draw = random["prefix"]
        is_shared, which = draw.random() < self.prefix.share, draw.randrange(self.prefix.count)
        return join([*(space.shared(which, self.prefix.tokens) if is_shared else []), own])


def _length(drawn: float) -> int:
    return min(max(1, round(drawn)), MAX_TOKENS)


Functions = dict[str, Callable[..., Any]]
DISTRIBUTIONS: Functions = {"fixed": fixed, "uniform": uniform, "lognormal": lognormal}
ARRIVALS: Functions = {
    "at_once": partial(fixed, 0), "poisson": poisson, "uniform": steady, "bursty": bursty,
}  # fmt: skip
SKEWS: Functions = {"even": partial(zipf, 0), "zipf": zipf, "heavy": heavy}


def parse_synthetic(text: str) -> Synthetic:
    """The workload that a text describes; ConfigError with the known fields if it is invalid."""
    values: dict[str, Any] = {}
    for part in re.split(r",(?![^()]*\))", text):  # commas outside parentheses
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in values:
            raise ConfigError(f"synthetic workload: {key} is given twice")
        if key in FIELDS and value:
            values[key] = FIELDS[key](value)
        elif part.strip():
            close = get_close_matches(key, FIELDS, n=1)
            hint = f"did you mean {close[0]}? Known" if close and key not in FIELDS else "known"
            raise ConfigError(
                f"synthetic workload: unknown field {part.strip()!r}; {hint}: {', '.join(FIELDS)}"
            )
    return Synthetic(**values)


def _number(text: str) -> float:
    if not re.fullmatch(r"\s*[0-9]{1,15}(\.[0-9]*)?\s*", text):
        raise ConfigError(f"synthetic workload: {text!r} is not a number of at least 0")
    return float(text) if "." in text else int(text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ConfigError(f"synthetic workload: {text!r} is not a whole number")
    return int(text)


def _call(functions: Functions, text: str) -> Any:
    """The result of `name(number,...)`."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text.strip())
    if match is None or match[1] not in functions:
        known = ", ".join(functions)
        raise ConfigError(f"synthetic workload: unknown function {text!r}; known: {known}")
    numbers = [_number(part) for part in match[2].split(",")] if match[2] else []
    try:
        return functions[match[1]](*numbers)
    except TypeError:
        raise ConfigError(f"synthetic workload: {text!r} has too few or too many numbers") from None


def _distribution(text: str) -> Distribution:
    if re.fullmatch(r"[0-9.]+", text):
        return fixed(_number(text))
    if "*" not in text:
        return _call(DISTRIBUTIONS, text)  # type: ignore[no-any-return]
    parts = [part.partition("*") for part in text.split("+")]
    return mix([(_number(weight), _call(DISTRIBUTIONS, inner)) for weight, _, inner in parts])


def _prefixes(text: str) -> Prefixes:
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})(?:@([0-9]*\.?[0-9]+))?", text)
    if match is None:
        raise ConfigError(
            f"synthetic workload: prefix must look like 4x512 or 4x512@0.5, not {text!r}"
        )
    name = "the share of requests with a prefix"
    share = real_number(name, float(match[3] or 1), above=0, high=1)
    return Prefixes(int(match[1]), min(int(match[2]), MAX_TOKENS), share)


def _accept(text: str) -> AcceptanceOf:
    """One histogram for all requests, or a probability for each of them, from a distribution."""
    if text.startswith("hist"):
        read_acceptance(text)
        return lambda _, seed: read_acceptance(text, seed)
    drawn = _distribution(text)
    return lambda random, seed: independent(drawn(random), seed)


FIELDS: dict[str, Callable[[str], Any]] = {
    "requests": _whole, "arrivals": partial(_call, ARRIVALS), "prompt": _distribution,
    "output": _distribution, "max_tokens": _whole, "prefix": _prefixes, "clients": _whole,
    "skew": partial(_call, SKEWS), "priorities": _whole, "slack": _distribution, "n": _whole,
    "accept": _accept, "seed": _whole,
}  # fmt: skip
