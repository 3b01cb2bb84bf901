"""What to run to learn a machine's times, and how well a profile foretells a run.

The run to be foretold is another workload than those that are fitted, with lengths and a mix of
its own. It comes between two halves of them: a machine that slows down as it gets warm does so for
all alike. Knows lengths and logs, no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.fit import observations, predict
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.jobs import Job
from headway.observe.run_stats import RunStats
from headway.observe.trace import Line, header, unpack_tokens

Wave = list[tuple[int, int]]  # prompt and output lengths of requests that come at once
MIN_TOKENS = 64  # of what a request may have, prompt and output


class Batch(NamedTuple):
    """Requests that come at once: how many, and between what their lengths lie."""

    num_requests: int
    shortest: int  # prompt; at most half of the longest
    longest: int
    outputs: range


class Amount(NamedTuple):
    """How much to run: what is fitted, twice, and what is held out."""

    fitted: tuple[Batch, ...]
    held_out: Batch


def _fitted(outputs: range, *spans: tuple[int, int, int]) -> tuple[Batch, ...]:
    return tuple(Batch(count, shortest, longest, outputs) for count, shortest, longest in spans)


ON_CPU = Amount(
    _fitted(range(8, 25), (1, 512, 1024), (32, 16, 64), (2, 16, 700), (16, 16, 96), (4, 16, 512),
            (8, 16, 256)),
    Batch(40, 16, 400, range(4, 41)),
)  # fmt: skip
QUICK_ON_CPU = Amount(
    _fitted(range(6, 15), (1, 128, 256), (12, 16, 32), (3, 16, 128)),
    Batch(14, 16, 150, range(4, 17)),
)
# Of 320 requests the last come in one by one, when others have left a seat. Those held out are long
# enough for half of them to wait through several steps of prompts.
ON_GPU = Amount(
    _fitted(range(16, 65), (1, 4096, 16384), (320, 16, 512), (2, 16, 8192), (128, 16, 1024),
            (4, 16, 4096), (64, 16, 2048), (8, 16, 2048), (32, 16, 4096), (16, 16, 1024),
            (192, 256, 1024), (240, 512, 3072)),
    Batch(400, 400, 1100, range(32, 257)),
)  # fmt: skip
QUICK_ON_GPU = Amount(
    _fitted(range(8, 33), (1, 2048, 4096), (280, 16, 256), (8, 16, 2048), (64, 16, 512)),
    Batch(300, 200, 800, range(16, 129)),
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Waves to run in this order."""

    before: list[Wave]
    held_out: Wave
    after: list[Wave]


def calibration(most_tokens: int, amount: Amount = ON_CPU, *, seed: int = 0) -> Calibration:
    """For requests of at most so many tokens, prompt and output together."""
    if most_tokens < MIN_TOKENS:
        raise ConfigError(
            f"requests of {most_tokens} tokens are too short to learn from; the model's length and "
            f"the KV cache must allow {MIN_TOKENS}"
        )
    source = random.Random(f"fit {seed}")
    waves = [
        _wave(source, batch, most_tokens) for batch in (*amount.fitted, *reversed(amount.fitted))
    ]
    held_out = _wave(random.Random(f"held out {seed}"), amount.held_out, most_tokens)
    half = len(amount.fitted)
    return Calibration(before=waves[:half], held_out=held_out, after=waves[half:])


def _wave(source: random.Random, batch: Batch, most_tokens: int) -> Wave:
    return [_lengths(source, batch, most_tokens) for _ in range(batch.num_requests)]


def _lengths(source: random.Random, batch: Batch, most_tokens: int) -> tuple[int, int]:
    """Short prompts are as likely as long ones, on a logarithmic scale; outputs evenly."""
    num_output = min(source.choice(batch.outputs), most_tokens // 2)
    longest = min(batch.longest, most_tokens - num_output)
    shortest = min(batch.shortest, (longest + 1) // 2)
    return round(shortest * (longest / shortest) ** source.random()), num_output


class Errors(NamedTuple):
    """How far a profile is off, as shares of what was measured; above 0 means too slow."""

    median: float  # of steps, without sign
    p90: float
    total: float  # of the sum of all steps
    simulated: float  # of the whole run, simulated from its requests alone
    ttft: float  # p50 of the time to first token, in the same simulation


def errors(
    lines: Sequence[Line], config: Config, profile: Profile, async_scheduling: bool = False
) -> Errors:
    """Of a log that no number of the profile comes from, of a run that was scheduled this way."""
    seen = observations(lines)
    plain = seen.chosen(seen.is_plain)
    ratios = predict(profile.rates, plain) / plain.seconds
    real, simulated = rerun(lines, config, profile, async_scheduling)
    return Errors(
        median=float(np.median(np.abs(ratios - 1))),
        p90=float(np.quantile(np.abs(ratios - 1), 0.9)),
        total=float(ratios @ plain.seconds / plain.seconds.sum() - 1),
        simulated=simulated["seconds"] / real["seconds"] - 1,
        ttft=simulated["ttft"]["p50"] / real["ttft"]["p50"] - 1,
    )


def rerun(
    lines: Sequence[Line], config: Config, profile: Profile, async_scheduling: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of a log of whole requests, and of a simulation of the same requests."""
    lines = _together(lines)
    real = RunStats(header(config, async_scheduling))
    for line in lines:
        real.add(line)
    again = simulate(jobs_of(lines), config, profile, async_scheduling=async_scheduling)
    return summarize(real), summarize(again.metrics)


def _together(lines: Sequence[Line]) -> list[Line]:
    """All that the first step knew of was there at once, however long it took to say so."""
    asked = lines[0].get("added", ()) if lines else ()
    start = max((each["arrival"] for each in asked), default=0.0)
    return [
        {**line, "added": [{**each, "arrival": start} for each in asked]} if not place else line
        for place, line in enumerate(lines)
    ]


def jobs_of(lines: Sequence[Line]) -> list[Job]:
    """The requests of a log, with the lengths that their outputs had."""
    outputs = {
        end["id"]: len(unpack_tokens(end["output"]))
        for line in lines
        for end in line.get("finished", ())
    }
    asked = [each for line in _together(lines) for each in line.get("added", ())]
    start = min((each["arrival"] for each in asked), default=0.0)
    return [
        Job(
            id=each["id"], pieces=(unpack_tokens(each["prompt"]),), num_output=outputs[each["id"]],
            max_tokens=each["max_tokens"], arrival=each["arrival"] - start,
        )
        for each in asked
    ]  # fmt: skip
