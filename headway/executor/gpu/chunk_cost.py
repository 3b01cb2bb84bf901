"""Measures what a step costs on this device, for the chunk rule `hold_tbt`.

It runs its own plans before any request is admitted, as swap_cost.py does: chunks of prompts of
several lengths at several places, and single tokens after contexts of several lengths. The formula
is that of headway/step_cost.py, with or without overlap, whichever fits better. Other requests that
decode are not measured: they count as tokens that read their context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headway.config import Config
from headway.executor.gpu.swap_cost import Timed, fit_nonnegative, prefill_seconds
from headway.step_cost import StepWork, UnitCosts

MAX_CONTEXT, MAX_CHUNK = 16384, 8192  # tokens of a probe, at most
MIN_CHUNK = 16
LONGEST = 2.0  # times the target; longer chunks are not measured
KNEES = (0, 64, 128, 256, 384, 512, 768, 1024)  # tokens that take as long as reading the weights


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
