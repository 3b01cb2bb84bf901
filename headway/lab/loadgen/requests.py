"""Benchmark requests: random lengths and prompts, arrivals, and the JSON that a server receives.

The generated token ids of a workload are mapped to ids of a real vocabulary, or to words. Equal ids
stay equal, so prefixes that a trace shares are shared on the server too. Sends nothing.
"""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from headway.checks import one_of, real_number, whole_number
from headway.errors import ConfigError
from headway.lab.workload.request import FIRST_TOKEN, TokenSpace, WorkloadRequest

PATHS = {
    "ids": "/v1/completions",  # prompts as token ids: lengths are exact
    "text": "/v1/completions",
    "chat": "/v1/chat/completions",
}
FIRST_PLAIN = 256  # vocabularies begin with special tokens and bytes
COMMON_WORDS = (
    "time year people way day man thing woman life child view school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
WORDS = COMMON_WORDS.split()


class LengthRange(NamedTuple):
    """Lengths in [low, high], uniformly distributed."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


def parse_length_range(name: str, text: str) -> LengthRange:
    """Parse 128 or 100-1024; ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    lengths = LengthRange(int(match[1]), int(match[2] or match[1])) if match else LengthRange(0, 0)
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(
            f"{name} must be a length such as 128 or a range such as 100-1024, not {text!r}"
        )
    return lengths


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    """Tokens drawn uniformly from the vocabulary, so that prompts share no block."""
    return [source.randrange(vocab_size) for _ in range(length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFormat:
    """How a request of a workload is sent to a server."""

    model: str
    kind: str = "ids"  # one of PATHS
    vocab_size: int = 32_000  # ids are below it; nearly every vocabulary is at least this large
    temperature: float = 0.0
    seed: int = 0  # another seed gives other prompts, which the server has not cached

    def __post_init__(self) -> None:
        one_of("prompts", self.kind, PATHS)
        whole_number("vocab_size", self.vocab_size, FIRST_PLAIN + 1)

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    def body(self, request: WorkloadRequest) -> bytes:
        """The JSON body: streamed, with usage, and with exactly the request's output length."""
        n = request.n if request.n > 1 else 0
        optional = {"user": request.client, "priority": request.priority, "n": n}
        fields = {
            "model": self.model, **self._prompt(self.tokens(request)),
            "max_tokens": request.num_output, "ignore_eos": True, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value},
        }  # fmt: skip
        if request.deadline is not None:  # seconds from sending, which is the arrival
            fields["deadline"] = max(0.0, request.deadline - request.arrival)
        return json.dumps(fields, separators=(",", ":")).encode()

    def _prompt(self, tokens: list[int]) -> dict[str, object]:
        if self.kind == "ids":
            return {"prompt": tokens}
        text = " ".join(WORDS[token % len(WORDS)] for token in tokens)
        if self.kind == "text":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}

    def tokens(self, request: WorkloadRequest) -> list[int]:
        """The prompt in the server's vocabulary; ids below FIRST_TOKEN are kept."""
        ids = np.frombuffer(request.prompt(), dtype=np.intc).astype(np.uint64)
        mixed = (ids + np.uint64(self.seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        spread = (mixed >> np.uint64(24)) % np.uint64(self.vocab_size - FIRST_PLAIN)
        real: list[int] = np.where(ids < FIRST_TOKEN, ids, spread + np.uint64(FIRST_PLAIN)).tolist()
        return real


def random_requests(
    count: int, inputs: LengthRange, outputs: LengthRange, seed: int
) -> list[WorkloadRequest]:
    """Requests that arrive together and share no prefix."""
    source, space = random.Random(seed), TokenSpace()
    requests = []
    for place in range(count):
        pieces, num = (space.take(inputs.draw(source)),), outputs.draw(source)
        requests.append(
            WorkloadRequest(id=str(place), pieces=pieces, num_output=num, max_tokens=num)
        )
    return requests


def with_poisson_arrivals(
    requests: Sequence[WorkloadRequest], rate: float, seed: int
) -> list[WorkloadRequest]:
    """The requests with Poisson arrivals of `rate` per second; with inf, all at once."""
    if math.isinf(rate) and rate > 0:
        return [replace(request, arrival=0.0) for request in requests]
    real_number("request-rate", rate, above=0)
    source, now, moved = random.Random(seed), 0.0, []
    for request in requests:
        moved.append(replace(request, arrival=now))
        now += source.expovariate(rate)
    return moved


def truncate(
    request: WorkloadRequest, max_input: int | None, max_output: int | None
) -> WorkloadRequest:
    """The request with at most this many prompt and output tokens."""
    left = request.num_prompt if max_input is None else max_input
    kept: list[range | array[int]] = []
    for piece in request.pieces:
        if left > 0:
            kept.append(piece[:left])
        left -= len(piece)
    output = min(request.num_output, max_output or request.num_output)
    return replace(request, pieces=tuple(kept), num_output=output, max_tokens=output)
