"""Which requests to run to measure a machine, and how well a profile predicts a run.

The error is measured on a held-out run: a workload with other lengths than the fitted ones. It runs
between the two halves of the fitted waves, so that a machine that slows down as it heats up affects
both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.profiling.fit import observations, predict
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.recorded import added_in, known_tokens
from headway.lab.workload.request import WorkloadRequest
from headway.record.lines import AddedLine, Line, PlannedLine, ends_of
from headway.record.packing import num_packed, unpack_tokens
from headway.record.stats import stats_of
from headway.record.writer import header

MIN_TOKENS = 64  # prompt and output of a request
MAX_REPEATED = 65_536  # prompt tokens of a wave that runs twice; a larger one has many steps
SHORT = (64, 8)  # the longest prompt and output of the waves that measure scheduling alone


class Wave(NamedTuple):
    """Requests that arrive together."""

    lengths: list[tuple[int, int]]  # of prompt and output
    max_num_seqs: int  # how many run at a time, at most; the others follow as some end

    @property
    def is_repeated(self) -> bool:
        return sum(prompt for prompt, _ in self.lengths) <= MAX_REPEATED

    def shortened(self) -> Wave:
        """As many requests at a time, with short prompts and outputs."""
        lengths = [(min(a, SHORT[0]), min(b, SHORT[1])) for a, b in self.lengths]
        return self._replace(lengths=lengths)


class WaveSpec(NamedTuple):
    """Number and lengths of requests that arrive together."""

    num_requests: int
    min_prompt: int  # lowered to half of max_prompt where the model allows no more
    max_prompt: int
    outputs: range
    max_num_seqs: int

    def draw(self, source: random.Random, max_tokens: int) -> Wave:
        lengths = [self._lengths(source, max_tokens) for _ in range(self.num_requests)]
        return Wave(lengths, self.max_num_seqs)

    def _lengths(self, source: random.Random, max_tokens: int) -> tuple[int, int]:
        """Prompt lengths are uniform on a logarithmic scale, output lengths on a linear one."""
        num_output = min(source.choice(self.outputs), max_tokens // 2)
        longest = min(self.max_prompt, max_tokens - num_output)
        shortest = min(self.min_prompt, (longest + 1) // 2)
        return round(shortest * (longest / shortest) ** source.random()), num_output


class CalibrationSpec(NamedTuple):
    """The waves to fit, most of which run twice, and the held-out wave."""

    fitted: tuple[WaveSpec, ...]
    held_out: WaveSpec


def _fitted(outputs: range, *waves: tuple[int, ...]) -> tuple[WaveSpec, ...]:
    """Waves of a number of requests, shortest and longest prompt, and how many run at a time."""
    return tuple(
        WaveSpec(count, low, high, outputs, *most or [count]) for count, low, high, *most in waves
    )


CPU_CALIBRATION = CalibrationSpec(
    _fitted(range(8, 25), (1, 512, 1024), (32, 16, 64), (2, 16, 700), (16, 16, 96), (4, 16, 512),
            (8, 16, 256)),
    WaveSpec(40, 16, 400, range(4, 41), 40),
)  # fmt: skip
QUICK_CPU_CALIBRATION = CalibrationSpec(
    _fitted(range(6, 15), (1, 128, 256), (12, 16, 32), (3, 16, 128)),
    WaveSpec(14, 16, 150, range(4, 17), 14),
)
# More requests than the default max_num_seqs of 256: the last ones are admitted one by one as
# others end, and so are those of the waves with a limit: a few decodes and one prompt in a step.
GPU_CALIBRATION = CalibrationSpec(
    _fitted(range(16, 65), (1, 4096, 16384), (320, 16, 512), (2, 16, 8192), (128, 16, 1024),
            (4, 16, 4096), (64, 16, 2048), (8, 16, 2048), (32, 16, 4096), (16, 16, 1024),
            (192, 256, 1024), (240, 512, 3072), (24, 16, 2048, 3), (60, 16, 1024, 12),
            (100, 16, 1024, 40), (200, 16, 512, 110)),
    WaveSpec(400, 400, 1100, range(32, 257), 400),
)  # fmt: skip
# The fixed time of a pass hides reading and computing in small steps. So the quick run, too, has
# batches with long contexts, which show the bandwidth, and steps full of prompt tokens, which show
# the arithmetic.
QUICK_GPU_CALIBRATION = CalibrationSpec(
    _fitted(range(8, 33), (1, 4096, 16384), (280, 16, 256), (2, 16, 4096), (8, 16, 2048),
            (128, 512, 2048), (32, 16, 1024), (64, 16, 512), (40, 16, 1024, 12),
            (90, 16, 1024, 40)),
    WaveSpec(300, 200, 800, range(16, 129), 300),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Waves to run, in this order."""

    before: list[Wave]
    held_out: Wave
    after: list[Wave]


def make_calibration(
    max_tokens: int, spec: CalibrationSpec = CPU_CALIBRATION, *, seed: int = 0
) -> Calibration:
    """Waves whose requests have at most `max_tokens` tokens, prompt and output together."""
    if max_tokens < MIN_TOKENS:
        raise ConfigError(
            f"the model's length and the KV cache allow requests of {max_tokens} tokens; profiling "
            f"needs at least {MIN_TOKENS}"
        )
    source = random.Random(f"fit {seed}")
    before = [wave.draw(source, max_tokens) for wave in spec.fitted]
    after = [wave.draw(source, max_tokens) for wave in reversed(spec.fitted)]
    after = [wave for wave in after if wave.is_repeated]
    held_out = spec.held_out.draw(random.Random(f"held out {seed}"), max_tokens)
    return Calibration(before=before, held_out=held_out, after=after)


class HeldOutError(NamedTuple):
    """Relative errors of a profile on a run that it was not fitted to; positive is too slow."""

    median: float  # absolute error of a step
    p90: float
    total: float  # the sum of all steps
    simulated: float  # the duration of the run, simulated from its requests alone
    ttft: float  # the median time to first token in that simulation


def held_out_error(
    lines: Sequence[Line], config: Config, profile: Profile, async_scheduling: bool = False
) -> HeldOutError:
    """The error on the log of a held-out run with this config."""
    seen = observations(lines)
    plain = seen.select(seen.is_plain)
    ratios = predict(profile, plain) / plain.seconds
    real, simulated = compare_with_simulation(lines, config, profile, async_scheduling)
    return HeldOutError(
        median=float(np.median(np.abs(ratios - 1))),
        p90=float(np.quantile(np.abs(ratios - 1), 0.9)),
        total=float(ratios @ plain.seconds / plain.seconds.sum() - 1),
        simulated=simulated["seconds"] / real["seconds"] - 1,
        ttft=simulated["ttft"]["p50"] / real["ttft"]["p50"] - 1,
    )


def compare_with_simulation(
    lines: Sequence[Line], config: Config, profile: Profile, async_scheduling: bool = False
) -> tuple[Summary, Summary]:
    """The summary of a log, and of a simulation of the same requests."""
    lines = _align_arrivals(lines)
    real = stats_of([header(config, async_scheduling), *lines])
    again = simulate(requests_of(lines), config, profile, async_scheduling=async_scheduling)
    return summarize(real), summarize(again.metrics)


def _align_arrivals(lines: Sequence[Line]) -> list[Line]:
    """The log with one arrival time for all requests that arrive before the first plan.

    They were submitted together; on a real clock their arrivals differ by the time to submit them.
    """
    first = list(takewhile(lambda line: not isinstance(line, PlannedLine), lines))
    start = max((each.arrival for each in added_in(first)), default=0.0)
    aligned: list[Line] = [
        AddedLine(line.t, [replace(each, arrival=start) for each in line.requests])
        if isinstance(line, AddedLine) else line
        for line in first
    ]  # fmt: skip
    return [*aligned, *lines[len(first) :]]


def requests_of(lines: Sequence[Line]) -> list[WorkloadRequest]:
    """The requests of a log, with the lengths of their outputs.

    Tokens that another engine had generated before belong to the prompt.
    """
    outputs = {end.id: num_packed(end.output) for line in lines for end in ends_of(line)}
    added = list(added_in(_align_arrivals(lines)))
    start = min((each.arrival for each in added), default=0.0)
    found = []
    for each in added:
        num_resumed, tokens = num_packed(each.output), known_tokens(each)
        assert each.max_tokens is not None and not isinstance(tokens, int), "the log is ours"
        found.append(WorkloadRequest(
            id=each.id, pieces=(unpack_tokens(tokens),), num_output=outputs[each.id] - num_resumed,
            max_tokens=each.max_tokens - num_resumed, arrival=each.arrival - start,
        ))  # fmt: skip
    return found
