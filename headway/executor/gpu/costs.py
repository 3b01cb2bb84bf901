"""Measures how long this device takes to swap blocks, to recompute tokens, and to run a step.

It runs its own plans before any request is admitted, and overwrites KV blocks. It knows plans and
blocks, but no policies: the caller decides whether swapping is cheaper. For the chunk rule
`hold_tbt`, it fits the formula of headway/step_cost.py, with or without overlap, whichever fits
better. Other requests that decode are not measured: they count as tokens that read their context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headway.config import Config
from headway.executor.base import Executor, Handle
from headway.plan import UNKNOWN_TOKEN, Admission, Chunk, Copy, Draft, Plan
from headway.request import Request, RequestParams
from headway.step_cost import StepWork, UnitCosts

FloatArray = npt.NDArray[np.float64]
MAX_RECOMPUTED, MAX_COPIED = 32768, 16384  # recomputed and copied tokens, at most
MIN_TRIES, MAX_TRIES = 4, 8
LONG_ENOUGH = 0.5  # seconds; two attempts this long are enough if their times are similar
SIMILAR = 0.9  # attempts stop when one takes at least this fraction of the best so far
# Of the probes of a step:
MAX_CONTEXT, MAX_CHUNK = 16384, 8192  # tokens, at most
MIN_CHUNK = 16
NUM_PROBED, NUM_DRAFTED = 16, 4  # steps of decodes and of drafts, and drafts of a step
LONGEST = 2.0  # times the target; longer chunks are not measured
KNEES = (0, 64, 128, 256, 384, 512, 768, 1024)  # tokens that take as long as reading the weights


class Timed(Executor, Protocol):
    @property
    def now(self) -> Callable[[], float]: ...


class SwapCost(NamedTuple):
    """The arguments of the swap rule `swap_if_cheaper`, in seconds."""

    copy: float  # per token, one way
    compute: float  # per token
    start: float  # per copy, whatever its size
    pair: float  # per token and earlier token (attention)


def measured(executor: Timed, config: Config) -> SwapCost:
    """Measure this executor; the config must have host blocks."""
    copy, start = _measure_copy(executor, config)
    compute, pair, hidden = _measure_compute(executor, config)
    return SwapCost(copy=copy, compute=compute, start=start + hidden / 2, pair=pair)


def _measure_copy(executor: Timed, config: Config) -> list[float]:
    """Seconds per token, and per copy."""
    most = max(1, MAX_COPIED // config.block_size)
    sizes = _spread(min(config.num_blocks, config.num_host_blocks, most))
    seconds = [swap_seconds(executor, size) / 2 for size in sizes]
    tokens = np.array(sizes) * config.block_size
    return fit_nonnegative(np.stack([np.ones(len(sizes)), 1 / tokens]), np.array(seconds) / tokens)


def _measure_compute(executor: Timed, config: Config) -> list[float]:
    """Seconds per token, per pair of tokens, and the time that a pass of one token hides.

    A swapped request computes its last token after it returns, in a pass that has a fixed cost
    and reads all weights. Other work in that pass is not delayed by swapping.
    """
    most = min(config.max_model_len, config.num_blocks * config.block_size, MAX_RECOMPUTED)
    lengths = np.array(_spread(most))
    saved = [
        recompute_seconds(executor, config, length) - resume_seconds(executor, config, length)
        for length in lengths.tolist()
    ]
    parts = np.stack([np.ones(len(lengths)), lengths / 2, -1 / lengths])
    return fit_nonnegative(parts, np.array(saved) / lengths)


def swap_seconds(executor: Timed, num_blocks: int) -> float:
    """Seconds to copy `num_blocks` to the host and back on an idle device; keeps their content."""
    copies = [Copy(block, block) for block in range(num_blocks)]
    out, back = Plan(0, copies_out=copies), Plan(0, copies_in=copies)
    return _best_time(lambda: _seconds(executor, [out]) + _seconds(executor, [back]))


def recompute_seconds(executor: Timed, config: Config, num_tokens: int) -> float:
    """Seconds to prefill `num_tokens` in the scheduler's chunks, on an idle device."""
    pieces, start = list[tuple[int, int]](), 0
    while start < num_tokens:
        most = min(num_tokens - start, config.max_num_batched_tokens)
        size = config.chunk(num_tokens - start, config.max_num_batched_tokens, True)
        pieces.append((start, start + (min(size, most) if size > 0 else most)))
        start = pieces[-1][1]
    return prefill_seconds(executor, config, num_tokens, pieces)


def resume_seconds(executor: Timed, config: Config, num_tokens: int) -> float:
    """Seconds to compute the last of `num_tokens`, as for a request that was swapped in."""
    return prefill_seconds(executor, config, num_tokens, [(num_tokens - 1, num_tokens)])


def finish(executor: Executor) -> None:
    """Wait for copies to the host, which may continue after a plan has run."""
    if swapper := getattr(executor, "swapper", None):
        swapper.finish()


def prefill_seconds(
    executor: Timed, config: Config, num_tokens: int, pieces: Sequence[tuple[int, int]]
) -> float:
    """Prefill the chunks [start, end) of one prompt, one plan each, without sampling."""
    request = Request("probe", [place % 32 for place in range(num_tokens)], RequestParams())
    request.row, request.limit = 0, num_tokens + 1
    request.kv.blocks = list(range(-(-num_tokens // config.block_size)))
    plans = [Plan(0, chunks=[Chunk(request, a, b, a, False)]) for a, b in pieces]
    plans[0].admitted = [Admission(request, pieces[0][0], 0, False)]
    return _best_time(lambda: _seconds(executor, plans))


def _best_time(measure: Callable[[], float]) -> float:
    """Return the best of several attempts, because other load only adds time.

    The first attempt may load kernels, so attempts go on while they improve.
    """
    found = [measure()]
    while len(found) < MAX_TRIES:
        best = min(found)
        found.append(measure())
        is_enough = len(found) >= MIN_TRIES or found[-1] >= LONG_ENOUGH
        if is_enough and found[-1] >= SIMILAR * best:
            break
    return min(found)


def _seconds(executor: Timed, plans: Sequence[Plan]) -> float:
    """Seconds from the first launch until all plans and their copies are done."""
    begun = executor.now()
    for handle in [executor.launch(plan) for plan in plans]:
        handle.wait()
    finish(executor)
    return executor.now() - begun


def _spread(most: int) -> list[int]:
    """Sizes up to `most`, spaced by factors of 2 to 4."""
    return sorted({max(1, most // share) for share in (64, 16, 4, 2, 1)})


def fit_nonnegative(parts: FloatArray, wholes: FloatArray) -> list[float]:
    """Non-negative least squares: coefficients of `parts` that best add up to `wholes`.

    Tries every subset of the parts and keeps the best fit without negative coefficients.
    """
    best, least = np.zeros(len(parts)), float(np.sum(wholes**2))
    for chosen in product((False, True), repeat=len(parts)):
        times = np.zeros(len(parts))
        times[list(chosen)] = np.linalg.lstsq(parts[list(chosen)].T, wholes, rcond=None)[0]
        error = float(np.sum((times @ parts - wholes) ** 2))
        if times.min() >= 0 and error < least:
            best, least = times, error
    return [float(times) for times in best]


class Probe(NamedTuple):
    """The work of a plan, and its measured time."""

    work: StepWork
    seconds: float


def measured_step(executor: Timed, config: Config, target: float) -> UnitCosts:
    """The cost of steps on this executor that take about `target` seconds."""
    most = min(config.max_model_len - 1, config.num_blocks * config.block_size, MAX_CONTEXT)
    singles = [
        _probe(executor, config, end - 1, end)
        for end in sorted({max(1, most // share) for share in (64, 8, 2, 1)})
    ]
    chunks: list[Probe] = []
    for size in _powers(min(most, config.max_num_batched_tokens, MAX_CHUNK)):
        for start in sorted({0, max(0, most - size)}):
            chunks.append(_probe(executor, config, start, start + size))
        if chunks[-1].seconds > LONGEST * target:
            break
    _, read = _fit([each.seconds for each in singles], [[each.work.reads for each in singles]])
    found = [_costs(chunks, read, 0.0, 0), *(_costs(chunks, read, 1.0, knee) for knee in KNEES)]
    return min(found, key=lambda costs: _error(costs, [*singles, *chunks]))


def measured_drafts(
    executor: Timed, config: Config, costs: UnitCosts, *, in_advance: bool
) -> tuple[UnitCosts, float]:
    """These costs as far as decodes alone differ, and the seconds that verifying drafts adds.

    A decode of one request and the verification of its drafts are timed as an engine runs them. With
    `in_advance`, decodes are launched while the one before runs, which drafts prevent.
    """
    request, start = Request("probe", [1] * NUM_PROBED, RequestParams()), NUM_PROBED
    end = start + 2 * NUM_PROBED
    if end > min(config.num_blocks * config.block_size, config.max_model_len - 1):
        return costs, 0.0  # no request is long enough to matter
    request.row, request.limit = 0, end + 1
    request.kv.blocks = list(range(-(-end // config.block_size)))
    rows = np.zeros(1, dtype=np.intp)
    prompt = Plan(0, chunks=[Chunk(request, 0, start, 0, True)])
    prompt.admitted = [Admission(request, 0, 0, False)]
    decodes = [Plan(0, decodes=[request], rows=rows) for _ in range(NUM_PROBED)]
    has_model = getattr(executor, "draft_model", None) is not None
    token = UNKNOWN_TOKEN if has_model else 1
    draft = Draft(request, start, NUM_DRAFTED, (token,) * NUM_DRAFTED)
    verifications = [Plan(0, drafts=[draft]) for _ in range(NUM_PROBED)]

    def seconds(plans: list[Plan], depth: int) -> float:
        executor.launch(prompt).wait()
        return _best_time(lambda: _in_turn(executor, plans, depth)) / len(plans)

    plain, drafted = seconds(decodes, int(in_advance)), seconds(verifications, 0)
    work = StepWork(1, 1, start, float(start))
    surplus = costs.seconds(*work) - plain
    fixed = max(0.0, costs.fixed - surplus)
    weights = max(0.0, costs.weights - max(0.0, surplus - costs.fixed))
    costs = costs._replace(fixed=fixed, weights=weights)
    return costs, max(0.0, drafted - costs.seconds(*work.with_more_rows(start, NUM_DRAFTED)))


def _in_turn(executor: Timed, plans: Sequence[Plan], depth: int) -> float:
    """Seconds of plans of which at most `depth` are launched while another runs."""
    begun, handles = executor.now(), deque[Handle]()
    for plan in plans:
        handles.append(executor.launch(plan))
        while len(handles) > depth:
            handles.popleft().wait()
    for handle in handles:
        handle.wait()
    return executor.now() - begun


def _probe(executor: Timed, config: Config, start: int, end: int) -> Probe:
    """Compute tokens [start, end) of a prompt."""
    work = StepWork(0, 0, 0, 0.0).with_chunk(start, end, is_last=False)
    return Probe(work, prefill_seconds(executor, config, end, [(start, end)]))


def _powers(most: int) -> list[int]:
    """Powers of two from MIN_CHUNK on, and `most`."""
    powers = [1 << place for place in range(MIN_CHUNK.bit_length() - 1, 64) if 1 << place < most]
    return [*powers, most]


def _costs(chunks: list[Probe], read: float, overlap: float, knee: int) -> UnitCosts:
    """The costs that explain the chunks best if reading the weights takes as long as `knee` tokens."""
    seconds = [each.seconds - (1 - overlap) * read * each.work.reads for each in chunks]
    parts: list[list[float]] = [
        [max(each.work.tokens, knee) for each in chunks],
        [each.work.pairs for each in chunks],
    ]
    fixed, token, pair = _fit(seconds, parts)
    return UnitCosts(
        weights=knee * token, token=token, sample=0.0, read=read, pair=pair, fixed=fixed,
        min_attention=0.0, overlap=overlap,
    )  # fmt: skip


def _fit(seconds: Sequence[float], parts: Sequence[Sequence[float]]) -> list[float]:
    """Fixed time and the coefficients of `parts` with the least relative errors, none negative."""
    measured = np.maximum(np.array(seconds), 1e-9)
    whole = np.array([[1.0] * len(seconds), *parts], dtype=np.float64)
    return fit_nonnegative(whole / measured, np.ones(len(seconds)))


def _error(costs: UnitCosts, probes: list[Probe]) -> float:
    return sum((costs.seconds(*each.work) / each.seconds - 1) ** 2 for each in probes)
