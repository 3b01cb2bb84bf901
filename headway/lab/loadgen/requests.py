"""Jobs as requests to an OpenAI-compatible server, and random jobs to ask it with.

A job's made-up token ids become ids of a real vocabulary, or words: equal ones stay equal, so a
trace's shared prefixes are shared on the server too. Sends nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.lab.bench import Span
from headway.lab.workload.jobs import FIRST_TOKEN, Job, Pieces, TokenSpace

KINDS = {
    "ids": "/v1/completions",  # prompts as token ids: lengths are exact
    "text": "/v1/completions",
    "chat": "/v1/chat/completions",
}
FIRST_PLAIN = 256  # vocabularies begin with special tokens and bytes
SOME_WORDS = (
    "time year people way day man thing woman life child view school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
WORDS = SOME_WORDS.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How a job is put to a server."""

    model: str
    kind: str = "ids"  # one of KINDS
    vocab_size: int = 32_000  # ids are below it; nearly every model has so many
    temperature: float = 0.0
    seed: int = 0  # another seed, other prompts: what the server has cached is of no use

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"prompts must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.vocab_size <= FIRST_PLAIN:
            raise ConfigError(f"vocab_size must be above {FIRST_PLAIN}, not {self.vocab_size}")

    def of_model(self, model: str) -> Wording:
        return replace(self, model=model)

    @property
    def path(self) -> str:
        return KINDS[self.kind]

    def body(self, job: Job) -> bytes:
        """The request's JSON: streamed, of exactly the job's output length, with usage."""
        asked: dict[str, Any] = {"model": self.model, **self._prompt(self.tokens(job))}
        asked |= {
            "max_tokens": job.num_output, "ignore_eos": True, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        given = {"user": job.client, "priority": job.priority, "n": job.n if job.n > 1 else 0}
        asked |= {name: value for name, value in given.items() if value}
        if job.deadline is not None:  # seconds from when it is sent, which is its arrival
            asked["deadline"] = max(0.0, job.deadline - job.arrival)
        return json.dumps(asked, separators=(",", ":")).encode()

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        if self.kind == "ids":
            return {"prompt": tokens}
        text = " ".join(WORDS[token % len(WORDS)] for token in tokens)
        if self.kind == "text":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}

    def tokens(self, job: Job) -> list[int]:
        """The job's prompt in the server's vocabulary; ids of a real one are left as they are."""
        ids = np.frombuffer(job.prompt(), dtype=np.intc).astype(np.uint64)
        mixed = (ids + np.uint64(self.seed * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        spread = (mixed >> np.uint64(24)) % np.uint64(self.vocab_size - FIRST_PLAIN)
        real: list[int] = np.where(ids < FIRST_TOKEN, ids, spread + np.uint64(FIRST_PLAIN)).tolist()
        return real


def random_jobs(count: int, inputs: Span, outputs: Span, seed: int) -> list[Job]:
    """Jobs that arrive together and share nothing."""
    source, space = random.Random(seed), TokenSpace()
    jobs = []
    for number in range(count):
        length, num_output = inputs.draw(source), outputs.draw(source)
        jobs.append(
            Job(id=str(number), pieces=(space.take(length),), num_output=num_output,
                max_tokens=num_output)
        )  # fmt: skip
    return jobs


def at_rate(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """The same jobs, arriving as a Poisson process of so many a second; inf: all at once."""
    if not rate > 0:
        raise ConfigError(f"rate must be above 0 requests a second, or inf, not {rate}")
    if math.isinf(rate):
        return [replace(job, arrival=0.0) for job in jobs]
    source, now, moved = random.Random(seed), 0.0, []
    for job in jobs:
        moved.append(replace(job, arrival=now))
        now += source.expovariate(rate)
    return moved


def cut(job: Job, max_input: int | None, max_output: int | None) -> Job:
    """The job with no more prompt and output than that: the beginning of what it was."""
    pieces: list[Any] = []
    left = job.num_prompt if max_input is None else max_input
    for piece in job.pieces:
        pieces += [piece[:left]] if left > 0 else []
        left -= len(piece)
    output = min(job.num_output, max_output or job.num_output)
    kept: Pieces = tuple(pieces)
    return replace(job, pieces=kept, num_output=output, max_tokens=output)
