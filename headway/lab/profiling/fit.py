"""Fit the numbers of a machine to the step log of a real run.

Minimises the relative error of the step times by absolute values, so that a few steps that took
twice their time, because the machine was busy, hardly change the result. Rates stay within physical
limits. A rate that the log does not determine is set to the lowest value that fits, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.lab.corrections import Corrections, factors, fit_corrections
from headway.lab.cost import Machine, Model, Profile
from headway.lab.profiling.minimize import Loss, Numbers, minimize
from headway.record.lines import CompletedLine, Line, PlannedLine
from headway.step_cost import StepWork

MIN_STEPS = 24
MIN_OF_KIND = 3  # steps that compute prompts, and steps that only decode
MIN_SPREAD = 4.0  # ratio of the largest to the smallest, for tokens and contexts of steps
EXACT = 0.03  # a relative error below which a closer fit hardly matters
NEGLIGIBLE = 1e-9  # seconds
# Physical limits of one device, by index of the search point: from a slow CPU core to several times
# the fastest GPU.
RATES = {0: ("bandwidth", 1e8, 2e13, "bytes/s"), 1: ("flops", 1e8, 1e16, "FLOP/s")}
LOWER_BOUNDS = np.array([*(np.log(low) for _, low, _, _ in RATES.values()), -80, -80, -80, -40])
UPPER_BOUNDS = np.array([*(np.log(high) for _, _, high, _ in RATES.values()), 80, 80, 80, 40])
MAX_LOSS_RATIO = 1.01  # a point whose loss is within this ratio of the best fits equally well
FASTER = 4.0  # a rate is undetermined if this multiple of it fits equally well
NUM_HALVINGS = 8
Step = tuple[PlannedLine, CompletedLine]


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The work and the times of steps; a plan of several steps is several passes."""

    passes: Numbers  # [pass, 4]: tokens, samples, reads and pairs, as a profile counts them
    step_of: npt.NDArray[np.intp]  # [pass]
    seconds: Numbers  # [step]
    copies: Numbers  # [step, 2]: directions in which blocks were copied, and blocks
    gaps: Numbers  # seconds from a step to the next one while there was work to do

    @property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """[step]: whether it computes and does not copy."""
        num_passes = np.bincount(self.step_of, minlength=len(self.seconds))
        return np.asarray((num_passes > 0) & (self.copies[:, 0] == 0))

    @cached_property
    def columns(self) -> Numbers:
        """[4, pass]: as `passes`, with the numbers of one kind side by side."""
        return np.ascontiguousarray(self.passes.T)

    @cached_property
    def is_one_to_one(self) -> bool:
        """Whether every step is one pass."""
        return np.array_equal(self.step_of, np.arange(len(self.seconds)))

    def select(self, is_selected: npt.NDArray[np.bool_]) -> Observations:
        kept = is_selected[self.step_of]
        places = np.cumsum(is_selected) - 1
        return replace(
            self, passes=self.passes[kept], step_of=places[self.step_of[kept]],
            seconds=self.seconds[is_selected], copies=self.copies[is_selected],
        )  # fmt: skip


class Fit(NamedTuple):
    """A fitted machine, and a sentence for every rate that the log does not determine."""

    machine: Machine
    warnings: list[str]


def observations(lines: Iterable[Line]) -> Observations:
    """The steps of a journal that has their plans and results, in the order of the results."""
    plans, steps = dict[int, PlannedLine](), list[Step]()
    for line in lines:
        if isinstance(line, PlannedLine):
            plans[line.step] = line
        elif isinstance(line, CompletedLine) and line.step in plans:
            steps.append((plans.pop(line.step), line))
    steps = [(plan, result) for plan, result in steps if result.end > result.start]
    passes = [(place, each) for place, (plan, _) in enumerate(steps) for each in _passes(plan)]
    copies = [(plan.copied_out, plan.copied_in) for plan, _ in steps]
    return Observations(
        passes=np.array([each for _, each in passes], dtype=float).reshape(-1, 4),
        step_of=np.array([place for place, _ in passes], dtype=np.intp),
        seconds=np.array([result.end - result.start for _, result in steps], dtype=float),
        copies=np.array([((a > 0) + (b > 0), a + b) for a, b in copies], float).reshape(-1, 2),
        gaps=np.array(_gaps(steps), dtype=float),
    )


def _passes(plan: PlannedLine) -> list[StepWork]:
    rows, context = plan.decodes, plan.decode_context
    work = StepWork(rows, rows, context, float(context))
    for _, start, count in plan.drafts:
        work = work.with_draft(start, start + 1 + count)
    for _, start, end, is_last in plan.chunks:
        work = work.with_chunk(start, end, is_last=is_last)
    num_steps = plan.num_steps if rows else 1
    later = [StepWork(rows, rows, n, n) for n in (context + rows * i for i in range(1, num_steps))]
    return [work, *later] if work.tokens else []


def _gaps(steps: list[Step]) -> list[float]:
    """Gaps between consecutive steps while work was left.

    A plan that was made while another one was in flight is skipped: its gap hides the scheduling.
    """
    gaps = []
    for (plan, result), (next_plan, next_result) in pairwise(steps):
        num_left = plan.running + plan.waiting - len(result.finished)
        is_hidden = next_plan.t < result.end
        if next_plan.step == plan.step + 1 and num_left > 0 and not is_hidden:
            gaps.append(max(0.0, next_result.start - result.end))
    return gaps


def predict(profile: Profile, seen: Observations) -> Numbers:
    """Seconds of every step without copies, as `Profile.step_seconds` but for a whole log."""
    formula: Any = profile.unit_costs.seconds  # typed for one pass
    seconds: Numbers = formula(*seen.columns, np.maximum, np.minimum)
    if profile.machine.corrections:
        tokens, samples, *_ = seen.columns
        decoded = factors(profile.machine.corrections, tokens)
        seconds *= np.where(tokens > samples, 1.0, decoded)
    return _sums(seen, seconds)


def _sums(seen: Observations, of_passes: Numbers) -> Numbers:
    """[step] from [pass]."""
    if seen.is_one_to_one:
        return of_passes
    sums = np.bincount(seen.step_of, weights=of_passes, minlength=len(seen.seconds))
    return sums.astype(np.float64, copy=False)


def fit(seen: Observations, model: Model, block_size: int = 16) -> Fit:
    """The machine that explains the measured step times best; ConfigError if the log is too poor."""
    plain = seen.select(seen.is_plain)
    if problems := missing_coverage(plain):
        raise ConfigError(f"the log cannot be fitted: {'; '.join(problems)}")
    weights = np.sqrt(plain.seconds)  # between equal weight per step and equal weight per second
    weights /= weights.sum()

    def loss(point: Numbers) -> float:
        errors = np.log(predict(_profile(_machine(point), model), plain) / plain.seconds)
        return float(weights @ np.sqrt(errors**2 + EXACT**2))

    point, warnings = _limit_undetermined(loss, minimize(loss, _starts(plain, model)))
    machine = _machine(point)
    machine = replace(machine, corrections=_corrections(_profile(machine, model), plain))
    rest = seen.seconds - predict(_profile(machine, model), seen)
    bandwidth, start = _copying(seen, rest, block_size * model.kv_bytes, machine.bandwidth)
    host = float(np.median(seen.gaps)) if len(seen.gaps) else 0.0
    machine = replace(machine, host_seconds=host, copy_bandwidth=bandwidth, copy_seconds=start)
    return Fit(machine, warnings)


def missing_coverage(plain: Observations) -> list[str]:
    """Why a log cannot separate the parts of a step's time, one phrase per reason."""
    if len(plain.seconds) < MIN_STEPS:
        return [
            f"it has {len(plain.seconds)} steps without copies, at least {MIN_STEPS} are needed"
        ]
    tokens, samples, reads, _ = plain.passes.T
    only_decodes, problems = tokens == samples, []
    if np.sum(~only_decodes) < MIN_OF_KIND:
        problems.append(f"fewer than {MIN_OF_KIND} steps compute prompts")
    if np.sum(only_decodes) < MIN_OF_KIND:
        problems.append(f"fewer than {MIN_OF_KIND} steps only decode")
    sizes = np.unique(tokens[only_decodes])
    if len(sizes) and sizes[-1] < MIN_SPREAD * sizes[0]:
        problems.append(
            f"decode steps have {sizes[0]:.0f} to {sizes[-1]:.0f} requests; the largest batch must "
            f"be at least {MIN_SPREAD:.0f} times the smallest"
        )
    if reads.max() < MIN_SPREAD * max(reads.min(), 1):
        problems.append(
            f"steps read {reads.min():.0f} to {reads.max():.0f} tokens of context; the longest must "
            f"be at least {MIN_SPREAD:.0f} times the shortest"
        )
    return problems


def _machine(point: Numbers) -> Machine:
    """The machine of a search point: logarithms, and the log-odds of the overlap."""
    bounded = np.minimum(np.maximum(point, LOWER_BOUNDS), UPPER_BOUNDS)
    bandwidth, flops, *times = np.exp(bounded[:5]).tolist()
    fixed, attention, prompt = (time if time > NEGLIGIBLE else 0.0 for time in times)
    return Machine(
        bandwidth=bandwidth, bandwidth_share=1.0, flops=flops, flops_share=1.0,
        fixed_seconds=fixed, attention_seconds=attention, prompt_seconds=prompt,
        overlap=float(1 / (1 + np.exp(-bounded[5]))),
        host_seconds=0.0, copy_bandwidth=bandwidth, copy_seconds=0.0,
    )  # fmt: skip


def _profile(machine: Machine, model: Model) -> Profile:
    return Profile(name="", description="", kv_tokens=1, model=model, machine=machine)


def _corrections(profile: Profile, plain: Observations) -> Corrections:
    """Those of the steps with one decode pass; several passes are not timed one by one."""
    is_single = np.bincount(plain.step_of, minlength=len(plain.seconds)) == 1
    single = plain.select(is_single)
    rows, samples, *_ = single.passes.T
    ratios = single.seconds / predict(profile, single)
    return fit_corrections(rows[rows == samples], ratios[rows == samples])


def _starts(plain: Observations, model: Model) -> list[Numbers]:
    """Points to search from: the fastest step is weights or fixed time, the slowest arithmetic."""
    shortest = float(plain.seconds.min())
    tokens = _sums(plain, plain.columns[0])
    rate = float(np.max(tokens / plain.seconds)) * model.dense_flops
    return [
        np.array([
            np.log((model.weight_bytes + model.expert_bytes) / shortest * wide), np.log(rate), np.log(shortest * share),
            np.log(shortest / 100), np.log(shortest / 100), odds,
        ])
        for wide, share, odds in product((1.0, 4.0), (0.05, 0.6), (-2.0, 2.0))
    ]  # fmt: skip


def _limit_undetermined(loss: Loss, best: Numbers) -> tuple[Numbers, list[str]]:
    """Set every rate that has no upper bound in the log to the lowest value that fits equally well.

    This happens where another time, mostly the fixed one, hides what the rate would explain.
    """
    limited, warnings = list[int](), list[str]()
    for place, (name, low, high, unit) in RATES.items():
        best[place] = np.clip(best[place], np.log(low), np.log(high))
        limit = loss(best) * MAX_LOSS_RATIO
        faster = min(best[place] + np.log(FASTER), np.log(high))
        is_at_limit = best[place] > np.log(high) - 0.01
        if not is_at_limit and loss(_refit(loss, best, [*limited, place], faster)) > limit:
            continue
        limited.append(place)
        best = _lowest_rate(loss, best, limited, np.log(low), limit)
        value = f"{np.exp(best[place]):.3g} {unit}"
        warnings.append(
            f"the measurements do not determine {name}: {value} and all faster values fit equally "
            f"well; the profile uses {value}"
        )
    return best, warnings


def _lowest_rate(loss: Loss, good: Numbers, fixed: list[int], bad: float, limit: float) -> Numbers:
    """The point with the lowest last fixed coordinate above `bad` whose loss is within the limit."""
    for _ in range(NUM_HALVINGS):
        point = _refit(loss, good, fixed, (bad + good[fixed[-1]]) / 2)
        if loss(point) > limit:
            bad = point[fixed[-1]]
        else:
            good = point
    return good


def _refit(loss: Loss, start: Numbers, fixed: list[int], value: float) -> Numbers:
    """The best point with some coordinates fixed, the last of them at `value`."""
    point = start.copy()
    point[fixed[-1]] = value
    free = np.delete(np.arange(len(start)), fixed)

    def with_free(values: Numbers) -> Numbers:
        changed = point.copy()
        changed[free] = values
        return changed

    return with_free(minimize(lambda values: loss(with_free(values)), [start[free]]))


def _copying(
    seen: Observations, rest: Numbers, block_bytes: float, bandwidth: float
) -> tuple[float, float]:
    """Bytes per second and seconds per batch; the memory's bandwidth if there are no copies."""
    is_copying = seen.copies[:, 0] > 0
    if not is_copying.any():
        return bandwidth, 0.0
    directions, blocks = seen.copies[is_copying].T
    sizes, seconds = blocks / directions, rest[is_copying] / directions
    first, second = np.triu_indices(len(sizes), 1)
    apart = sizes[first] != sizes[second]
    slopes = ((seconds[first] - seconds[second])[apart]) / (sizes[first] - sizes[second])[apart]
    slope = float(np.median(slopes)) if apart.any() else 0.0
    if slope <= 0:  # all of one size, or only noise
        return block_bytes / max(float(np.median(seconds / sizes)), NEGLIGIBLE), 0.0
    return block_bytes / slope, max(0.0, float(np.median(seconds - slope * sizes)))
