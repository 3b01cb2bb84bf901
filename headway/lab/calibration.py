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
from headway.engine.metrics import Metrics
from headway.engine.trace import Line, header, unruns
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.fit import observations, predict
from headway.lab.jobs import Job
from headway.lab.simulate import simulate
from headway.lab.summary import summarize

Wave = list[tuple[int, int]]  # prompt and output lengths of requests that come at once
SHORTEST, LEAST_TOKENS = 16, 64  # of a prompt; of what a request may have, prompt and output
BATCHES = ((1, 1024), (32, 64), (2, 700), (16, 96), (4, 512), (8, 256))  # requests, longest prompt
FEW_BATCHES = ((1, 256), (12, 32), (3, 128))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Waves to run in this order."""

    before: list[Wave]
    held_out: Wave
    after: list[Wave]

    @property
    def num_requests(self) -> int:
        return sum(map(len, (*self.before, self.held_out, *self.after)))


def calibration(most_tokens: int, *, is_quick: bool = False, seed: int = 0) -> Calibration:
    """For requests of at most so many tokens, prompt and output together."""
    if most_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"requests of {most_tokens} tokens are too short to learn from; the model's length and "
            f"the KV cache must allow {LEAST_TOKENS}"
        )
    source = random.Random(f"fit {seed}")
    batches = FEW_BATCHES if is_quick else BATCHES
    outputs = range(6, 15) if is_quick else range(8, 25)
    waves = [
        [_lengths(source, longest, outputs, most_tokens, is_long=size == 1) for _ in range(size)]
        for size, longest in (*batches, *reversed(batches))
    ]
    other = random.Random(f"held out {seed}")
    size, longest, others = (14, 150, range(4, 17)) if is_quick else (40, 400, range(4, 41))
    held_out = [_lengths(other, longest, others, most_tokens) for _ in range(size)]
    half = len(batches)
    return Calibration(before=waves[:half], held_out=held_out, after=waves[half:])


def _lengths(
    source: random.Random, longest: int, outputs: range, most_tokens: int, is_long: bool = False
) -> tuple[int, int]:
    """Short prompts are as likely as long ones, on a logarithmic scale; outputs evenly."""
    num_output = source.choice(outputs)
    longest = min(longest, most_tokens - num_output)
    shortest = (longest + 1) // 2 if is_long else SHORTEST
    return round(shortest * (longest / shortest) ** source.random()), num_output


class Errors(NamedTuple):
    """How far a profile is off, as shares of what was measured; above 0 means too slow."""

    median: float  # of steps, without sign
    p90: float
    total: float  # of the sum of all steps
    simulated: float  # of the whole run, simulated from its requests alone
    ttft: float  # p50 of the time to first token, in the same simulation


def errors(lines: Sequence[Line], config: Config, profile: Profile) -> Errors:
    """Of a log that no number of the profile comes from."""
    seen = observations(lines)
    plain = seen.chosen(seen.is_plain)
    ratios = predict(profile.rates, plain) / plain.seconds
    real, simulated = rerun(lines, config, profile)
    return Errors(
        median=float(np.median(np.abs(ratios - 1))),
        p90=float(np.quantile(np.abs(ratios - 1), 0.9)),
        total=float(ratios @ plain.seconds / plain.seconds.sum() - 1),
        simulated=simulated["seconds"] / real["seconds"] - 1,
        ttft=simulated["ttft"]["p50"] / real["ttft"]["p50"] - 1,
    )


def rerun(
    lines: Sequence[Line], config: Config, profile: Profile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of a log of whole requests, and of a simulation of the same requests."""
    real = Metrics(header(config, 0))
    for line in lines:
        real.add(line)
    return summarize(real), summarize(simulate(jobs_of(lines), config, profile).metrics)


def jobs_of(lines: Sequence[Line]) -> list[Job]:
    """The requests of a log, with the lengths that their outputs had."""
    outputs = {
        end["id"]: len(unruns(end["output"])) for line in lines for end in line.get("finished", ())
    }
    asked = [(place, each) for place, line in enumerate(lines) for each in line.get("added", ())]
    start = min((each["arrival"] for _, each in asked), default=0.0)
    return [
        Job(
            id=each["id"], pieces=(unruns(each["prompt"]),), num_output=outputs[each["id"]],
            max_tokens=each["max_tokens"],
            # All that the first step knew of was there at once, however long it took to say so.
            arrival=each["arrival"] - start if place else 0.0,
        )
        for place, each in asked
    ]  # fmt: skip
