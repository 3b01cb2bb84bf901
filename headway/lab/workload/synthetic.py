"""Workloads out of distributions: arrivals, lengths, shared prefixes, clients. Knows no files.

Text form, words in any order and all optional:
    requests=256          how many
    arrivals=at_once      or poisson(rate), uniform(rate), bursty(rate,cv): gamma gaps; per second
    prompt=fixed(512)     or 512, uniform(lo,hi), lognormal(mean,sigma,lo,hi), or a mix of them by
    output=fixed(128)     weight: 0.9*uniform(10,200)+0.1*fixed(4000)
    max_tokens=1024       what users allow, and the most that is generated; `output` unless given
    prefix=4x512@0.5      4 prefixes of 512 tokens before the prompts of half of the requests
    clients=8             and skew=even, zipf(exponent) or heavy(share of the first client)
    priorities=3          levels, drawn evenly
    slack=uniform(1.0,5)  seconds from arrival to deadline
    n=1, seed=0           samples of each prompt, and the seed
uniform(lo,hi) of two whole numbers draws whole numbers, both ends included; a length below 1 is 1.
Every word has its own random stream: changing one leaves what the others draw as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from random import Random
from typing import Any

from headway.errors import ConfigError
from headway.lab.workload.jobs import MAX_TOKENS, Job, Pieces, TokenSpace, join

Draw = Callable[[Random], float]
Weights = Callable[[int], list[float]]  # of so many clients


def fixed(value: float) -> Draw:
    return lambda _: value


def uniform(low: float, high: float) -> Draw:
    if not low <= high:
        raise ConfigError(f"uniform({low},{high}): the first number must not be the larger")
    if isinstance(low, int) and isinstance(high, int):
        return lambda random: random.randint(low, high)
    return lambda random: random.uniform(low, high)


def lognormal(mean: float, sigma: float, low: float = 1, high: float = 32_768) -> Draw:
    """`mean` is that of the whole distribution, before it is clipped to [low, high]."""
    if sigma > 10 or low > high:
        raise ConfigError(f"lognormal: sigma ({sigma}) is above 10, or {low} above {high}")
    centre = math.log(_positive("mean", mean)) - sigma * sigma / 2
    return lambda random: min(max(random.lognormvariate(centre, sigma), low), high)


def mix(parts: list[tuple[float, Draw]]) -> Draw:
    weights = [_positive("the weight of a part", weight) for weight, _ in parts]
    return lambda random: random.choices(parts, weights)[0][1](random)


def poisson(rate: float) -> Draw:
    """Gaps between arrivals, in seconds; so are `steady` and `bursty`."""
    _positive("rate", rate)
    return lambda random: random.expovariate(rate)


def steady(rate: float) -> Draw:
    return fixed(1 / _positive("rate", rate))


def bursty(rate: float, cv: float) -> Draw:
    """Gamma gaps with a coefficient of variation: 1 is Poisson, more comes in bursts."""
    shape, mean = _positive("cv", cv) ** -2, 1 / _positive("rate", rate)
    return lambda random: random.gammavariate(shape, mean / shape)


def zipf(exponent: float) -> Weights:
    return lambda clients: [(place + 1) ** -exponent for place in range(clients)]


def heavy(share: float) -> Weights:
    """The first client sends `share` of the requests, the others the rest in equal parts."""
    if not 0 < share < 1:
        raise ConfigError(f"heavy({share}): a share is between 0 and 1")
    return lambda clients: [share] + [(1 - share) / max(1, clients - 1)] * (clients - 1)


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, not {value}")
    return value


AT_ONCE, PROMPT, OUTPUT, EVEN = fixed(0), fixed(512), fixed(128), zipf(0)


@dataclass(frozen=True)
class Prefixes:
    """`number` prefixes of `tokens` each; a request starts with one with chance `share`."""

    number: int = 0
    tokens: int = 0
    share: float = 1.0


MOST = {
    "requests": 10_000_000, "max_tokens": MAX_TOKENS, "clients": 1_000_000,
    "priorities": 1_000_000, "n": 1024,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A workload described; `jobs()` makes it, the same every time."""

    requests: int = 256
    arrivals: Draw = AT_ONCE
    prompt: Draw = PROMPT
    output: Draw = OUTPUT
    max_tokens: int | None = None
    prefix: Prefixes = Prefixes()
    clients: int = 1
    skew: Weights = EVEN
    priorities: int = 1
    slack: Draw | None = None
    n: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "max_tokens", "clients", "priorities", "n"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST[name]:
                raise ConfigError(
                    f"{name} must be at least 1 and at most {MOST[name]:,}, not {value}"
                )

    def jobs(self) -> list[Job]:
        """The jobs, in order of arrival; the first comes at 0."""
        space = TokenSpace()
        random = {field.name: Random(f"{self.seed} {field.name}") for field in fields(self)}
        weights, names = self.skew(self.clients), [f"client-{i}" for i in range(self.clients)]
        jobs: list[Job] = []
        arrival = 0.0
        for place in range(self.requests):
            output = min(_length(self.output(random["output"])), self.max_tokens or MAX_TOKENS)
            client = random["clients"].choices(names, weights)[0]
            slack = self.slack(random["slack"]) if self.slack else None
            jobs.append(Job(
                id=str(place), arrival=arrival, pieces=self._pieces(random, space),
                num_output=output, max_tokens=self.max_tokens or output,
                client=client if self.clients > 1 else "", n=self.n,
                priority=random["priorities"].randrange(self.priorities),
                deadline=None if slack is None else arrival + slack,
            ))  # fmt: skip
            arrival += max(0.0, self.arrivals(random["arrivals"]))
        return jobs

    def _pieces(self, random: dict[str, Random], space: TokenSpace) -> Pieces:
        own = space.take(_length(self.prompt(random["prompt"])))
        if not self.prefix.number:
            return (own,)
        draw = random["prefix"]
        is_shared, which = draw.random() < self.prefix.share, draw.randrange(self.prefix.number)
        return join([*(space.shared(which, self.prefix.tokens) if is_shared else []), own])


def _length(drawn: float) -> int:
    return min(max(1, round(drawn)), MAX_TOKENS)


Kinds = dict[str, Callable[..., Any]]
DRAWS: Kinds = {"fixed": fixed, "uniform": uniform, "lognormal": lognormal}
ARRIVALS: Kinds = {
    "at_once": partial(fixed, 0), "poisson": poisson, "uniform": steady, "bursty": bursty,
}  # fmt: skip
SKEWS: Kinds = {"even": partial(zipf, 0), "zipf": zipf, "heavy": heavy}


def parse_synthetic(text: str) -> Synthetic:
    """The workload a text describes; ConfigError with the known words if it describes none."""
    words: dict[str, Any] = {}
    for word in re.split(r",(?![^()]*\))", text):  # commas outside brackets
        key, _, value = (part.strip() for part in word.partition("="))
        if key in words:
            raise ConfigError(f"synthetic workload: {key} is given twice")
        if key in WORDS and value:
            words[key] = WORDS[key](value)
        elif word.strip():
            known = ", ".join(WORDS)
            raise ConfigError(f"synthetic workload: unknown word {word.strip()!r}; known: {known}")
    return Synthetic(**words)


def _number(text: str) -> float:
    if not re.fullmatch(r"\s*[0-9]{1,15}(\.[0-9]*)?\s*", text):
        raise ConfigError(f"synthetic workload: {text!r} is not a number from 0 up")
    return float(text) if "." in text else int(text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ConfigError(f"synthetic workload: {text!r} is not a whole number")
    return int(text)


def _called(kinds: Kinds, text: str) -> Any:
    """What `name(number,...)` stands for."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text.strip())
    if match is None or match[1] not in kinds:
        known = ", ".join(kinds)
        raise ConfigError(f"synthetic workload: {text!r} is not known; known: {known}")
    numbers = [_number(part) for part in match[2].split(",")] if match[2] else []
    try:
        return kinds[match[1]](*numbers)
    except TypeError:
        raise ConfigError(f"synthetic workload: {text!r} has too few or too many numbers") from None


def _draw(text: str) -> Draw:
    if re.fullmatch(r"[0-9.]+", text):
        return fixed(_number(text))
    if "*" not in text:
        return _called(DRAWS, text)  # type: ignore[no-any-return]
    parts = [part.partition("*") for part in text.split("+")]
    return mix([(_number(weight), _called(DRAWS, draw)) for weight, _, draw in parts])


def _prefixes(text: str) -> Prefixes:
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})(?:@(0?\.[0-9]+|1))?", text)
    if match is None:
        raise ConfigError(f"synthetic workload: prefix is like 4x512 or 4x512@0.5, not {text!r}")
    return Prefixes(int(match[1]), min(int(match[2]), MAX_TOKENS), float(match[3] or 1))


WORDS: dict[str, Callable[[str], Any]] = {
    "requests": _whole, "arrivals": partial(_called, ARRIVALS), "prompt": _draw, "output": _draw,
    "max_tokens": _whole, "prefix": _prefixes, "clients": _whole, "skew": partial(_called, SKEWS),
    "priorities": _whole, "slack": _draw, "n": _whole, "seed": _whole,
}  # fmt: skip


def field_workload(unknown_lengths: bool = False) -> list[Job]:
    """The benchmark of the field: 256 requests at once, input and output each 100 to 1024 tokens.

    Lengths are those that nano-vLLM's bench draws after seed(0). With `unknown_lengths` the same is
    generated, but every user allows 1024 tokens: the end token comes at random below that.
    """
    random, space = Random(0), TokenSpace()
    prompts: list[range] = []
    for _ in range(256):
        prompts.append(space.take(random.randint(100, 1024)))
        for _ in prompts[-1]:
            random.randint(0, 10_000)  # the bench draws a token here
    outputs = [random.randint(100, 1024) for _ in prompts]
    return [
        Job(
            id=str(place), pieces=(prompt,), num_output=output,
            max_tokens=1024 if unknown_lengths else output,
        )
        for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip
