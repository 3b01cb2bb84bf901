"""From the step log of a real run to the machine numbers of a profile.

Minimises the relative error of steps, by absolute values: a step in ten that took twice its time,
because the machine was busy with something else, hardly moves the result. Knows trace lines, no
model and no clock; what to run for a good log, and how good the numbers are, is in calibration.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.lab.cost import Machine, Model, Profile, Rates
from headway.lab.search import lowest
from headway.observe.trace import Line

Numbers = npt.NDArray[np.float64]
MIN_STEPS = 24
MIN_OF_KIND = 3  # steps that compute prompts, and steps that only decode
MIN_SPREAD = 4.0  # times, of the tokens and of the contexts of steps
EXACT = 0.03  # a relative error below which closer hardly matters
NEGLIGIBLE = 1e-9  # seconds


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What steps had to do and how long they took; a plan of several steps is several passes."""

    passes: Numbers  # [pass, 4]: tokens, samples, reads and pairs, as a profile counts them
    step_of: npt.NDArray[np.intp]  # [pass]
    seconds: Numbers  # [step]
    copies: Numbers  # [step, 2]: directions in which blocks were copied, and blocks
    gaps: Numbers  # between a step and the next, while there was work to do

    @property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """[step]: it computes and copies nothing."""
        computes = np.zeros(len(self.seconds), dtype=bool)
        computes[self.step_of] = True
        computes &= self.copies[:, 0] == 0
        return computes

    def chosen(self, is_chosen: npt.NDArray[np.bool_]) -> Observations:
        """Only these steps."""
        kept = is_chosen[self.step_of]
        places = np.cumsum(is_chosen) - 1
        return replace(
            self, passes=self.passes[kept], step_of=places[self.step_of[kept]],
            seconds=self.seconds[is_chosen], copies=self.copies[is_chosen],
        )  # fmt: skip


def observations(lines: Iterable[Line]) -> Observations:
    """The steps of a log; lines that are no step, a header or an abort, are passed over."""
    steps = [line for line in lines if line.get("step", -1) >= 0 and line["end"] > line["start"]]
    passes = [(place, each) for place, line in enumerate(steps) for each in _passes(line)]
    copies = [(line.get("copied_out", 0), line.get("copied_in", 0)) for line in steps]
    return Observations(
        passes=np.array([each for _, each in passes], dtype=float).reshape(-1, 4),
        step_of=np.array([place for place, _ in passes], dtype=np.intp),
        seconds=np.array([line["end"] - line["start"] for line in steps], dtype=float),
        copies=np.array([((a > 0) + (b > 0), a + b) for a, b in copies], float).reshape(-1, 2),
        gaps=np.array(_gaps(steps), dtype=float),
    )


def _passes(line: Line) -> list[tuple[float, ...]]:
    rows, context = line["decodes"], line.get("decode_context", 0)
    tokens, samples, reads, pairs = rows, rows, context, float(context)
    for _, start, end, is_last in line.get("chunks", ()):
        tokens += end - start
        samples += is_last
        reads += end
        pairs += (end - start) * (start + (end - start + 1) / 2)
    passes: list[tuple[float, ...]] = [(tokens, samples, reads, pairs)] if tokens else []
    for step in range(1, line.get("num_steps", 1) if rows else 1):
        passes.append((rows, rows, context + step * rows, context + step * rows))
    return passes


def _gaps(steps: list[Line]) -> list[float]:
    """Only where the next step followed at once: the log is whole there and work was left.

    A plan that was made while another was in flight tells nothing: its making was hidden.
    """
    gaps = []
    for line, after in pairwise(steps):
        num_left = line["running"] + line["waiting"] - len(line.get("finished", ()))
        is_hidden = after.get("in_flight", 0) > 0
        if after["step"] == line["step"] + 1 and num_left > 0 and not is_hidden:
            gaps.append(max(0.0, after["start"] - line["end"]))
    return gaps


def predict(rates: Rates, seen: Observations) -> Numbers:
    """Seconds of every step's passes, without copies; `Profile.step_seconds` for a whole log."""
    tokens, samples, reads, pairs = seen.passes.T
    dense = tokens * rates.token + samples * rates.sample
    read, pair, exposed = reads * rates.read, pairs * rates.pair, 1 - rates.overlap
    linear = np.maximum(dense, rates.weights) + exposed * np.minimum(dense, rates.weights)
    attention = np.maximum(read, pair) + exposed * np.minimum(read, pair)
    seconds = rates.fixed + linear + np.maximum(attention, rates.least)
    return _sums(seen, seconds)


def _sums(seen: Observations, of_passes: Numbers) -> Numbers:
    """[step] of [pass]."""
    sums = np.bincount(seen.step_of, weights=of_passes, minlength=len(seen.seconds))
    return sums.astype(np.float64, copy=False)


def fit(seen: Observations, model: Model, block_size: int = 16) -> Machine:
    """The machine on which these steps take the time they took; ConfigError if too few tell."""
    plain = seen.chosen(seen.is_plain)
    if problems := missing(plain):
        raise ConfigError(f"the log cannot be fitted: {'; '.join(problems)}")
    weights = np.sqrt(plain.seconds)  # between counting steps alike and counting seconds alike
    weights /= weights.sum()

    def loss(point: Numbers) -> float:
        errors = np.log(predict(_rates(_machine(point), model), plain) / plain.seconds)
        return float(weights @ np.sqrt(errors**2 + EXACT**2))

    machine = _machine(lowest(loss, _starts(plain, model)))
    rest = seen.seconds - predict(_rates(machine, model), seen)
    bandwidth, start = _copying(seen, rest, block_size * model.kv_bytes, machine.bandwidth)
    host = float(np.median(seen.gaps)) if len(seen.gaps) else 0.0
    return replace(machine, host_seconds=host, copy_bandwidth=bandwidth, copy_seconds=start)


def missing(plain: Observations) -> list[str]:
    """What a log lacks to tell the parts of a step's time apart, a phrase each."""
    if len(plain.seconds) < MIN_STEPS:
        return [f"it has {len(plain.seconds)} steps that copy nothing, {MIN_STEPS} are needed"]
    tokens, samples, reads, _ = plain.passes.T
    only_decodes, problems = tokens == samples, []
    if np.sum(~only_decodes) < MIN_OF_KIND:
        problems.append(f"fewer than {MIN_OF_KIND} steps compute prompts")
    if np.sum(only_decodes) < MIN_OF_KIND:
        problems.append(f"fewer than {MIN_OF_KIND} steps only decode")
    sizes = np.unique(tokens[only_decodes])
    if len(sizes) and sizes[-1] < MIN_SPREAD * sizes[0]:
        problems.append(
            f"decode steps have {sizes[0]:.0f} to {sizes[-1]:.0f} requests: batches of other "
            f"sizes are missing, the largest at least {MIN_SPREAD:.0f} times the smallest"
        )
    if reads.max() < MIN_SPREAD * max(reads.min(), 1):
        problems.append(
            f"steps read {reads.min():.0f} to {reads.max():.0f} tokens of context: others are "
            f"missing, the longest at least {MIN_SPREAD:.0f} times the shortest"
        )
    return problems


def _machine(point: Numbers) -> Machine:
    """From what is searched: logarithms, and the log-odds of the overlap."""
    bandwidth, flops, fixed, least = np.exp(np.clip(point[:4], -80, 80)).tolist()
    return Machine(
        bandwidth=bandwidth, bandwidth_share=1.0, flops=flops, flops_share=1.0,
        fixed_seconds=fixed if fixed > NEGLIGIBLE else 0.0,
        attention_seconds=least if least > NEGLIGIBLE else 0.0,
        overlap=float(1 / (1 + np.exp(-np.clip(point[4], -40, 40)))),
        host_seconds=0.0, copy_bandwidth=bandwidth, copy_seconds=0.0,
    )  # fmt: skip


def _rates(machine: Machine, model: Model) -> Rates:
    return Profile(name="", description="", kv_tokens=1, model=model, machine=machine).rates


def _starts(plain: Observations, model: Model) -> list[Numbers]:
    """Where to search from: the fastest step is weights or fixed time, the slowest arithmetic."""
    least = float(plain.seconds.min())
    tokens = _sums(plain, plain.passes[:, 0])
    rate = float(np.max(tokens / plain.seconds)) * model.dense_flops
    return [
        np.array([
            np.log(model.weight_bytes / least * wide), np.log(rate), np.log(least * share),
            np.log(least / 100), odds,
        ])
        for wide, share, odds in product((1.0, 4.0), (0.05, 0.6), (-2.0, 2.0))
    ]  # fmt: skip


def _copying(
    seen: Observations, rest: Numbers, block_bytes: float, bandwidth: float
) -> tuple[float, float]:
    """Bytes a second and seconds of every batch; the memory's bandwidth if nothing was copied."""
    directions, blocks = seen.copies[seen.copies[:, 0] > 0].T
    sizes, seconds = blocks / directions, rest[seen.copies[:, 0] > 0] / directions
    first, second = np.triu_indices(len(sizes), 1)
    apart = sizes[first] != sizes[second]
    if not len(sizes):
        return bandwidth, 0.0
    slopes = ((seconds[first] - seconds[second])[apart]) / (sizes[first] - sizes[second])[apart]
    slope = float(np.median(slopes)) if apart.any() else 0.0
    if slope <= 0:  # one size only, or nothing but noise
        return block_bytes / max(float(np.median(seconds / sizes)), NEGLIGIBLE), 0.0
    return block_bytes / slope, max(0.0, float(np.median(seconds - slope * sizes)))
