"""How long this device takes to copy blocks to the host and back, and to compute tokens again.

Measured with plans of its own, before anybody is seated: what lies in the blocks is lost. Knows
plans and blocks, no policies; whether to swap is for whoever asks to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headway.config import Config
from headway.executor.base import Executor
from headway.plan import Admission, Chunk, Copy, Plan
from headway.request import Params, Request

Numbers = npt.NDArray[np.float64]
MAX_TOKENS, MAX_COPIED = 32768, 16384  # computed again, and copied: to see what grows how
FEW_TRIES, MAX_TRIES = 4, 8
LONG_ENOUGH = 0.5  # seconds of a try; two such do, if they are alike
ALIKE = 0.9  # a try that takes at least so much of the best before it brings nothing new


class Timed(Executor, Protocol):
    """An executor with a clock."""

    @property
    def now(self) -> Callable[[], float]: ...


class SwapTimes(NamedTuple):
    """What swapping and computing again take, in the words of the swap rule `cheaper`. Seconds."""

    copy: float  # one token, one way
    compute: float  # one token
    start: float  # a copy, whatever its size
    pair: float  # one token, for each that is before it


def measured(executor: Timed, config: Config) -> SwapTimes:
    """Times of this executor; the config must have host blocks."""
    copy, start = _copying(executor, config)
    compute, pair, hidden = _computing(executor, config)
    return SwapTimes(copy=copy, compute=compute, start=start + hidden / 2, pair=pair)


def _copying(executor: Timed, config: Config) -> list[float]:
    """Seconds of one token, and of a copy."""
    most = max(1, MAX_COPIED // config.block_size)
    sizes = _spread(min(config.num_blocks, config.num_host_blocks, most))
    seconds = [swap_seconds(executor, size) / 2 for size in sizes]
    tokens = np.array(sizes) * config.block_size
    return _fitted(np.stack([np.ones(len(sizes)), 1 / tokens]), np.array(seconds) / tokens)


def _computing(executor: Timed, config: Config) -> list[float]:
    """Seconds of one token, of one token and one before it, and what a pass of one token hides.

    A swapped request computes its last token when it is back, in a pass that has its fixed time
    and reads all weights. What that pass could have computed besides is not lost by swapping.
    """
    most = min(config.max_model_len, config.num_blocks * config.block_size, MAX_TOKENS)
    lengths = np.array(_spread(most))
    saved = [
        recompute_seconds(executor, config, length) - resume_seconds(executor, config, length)
        for length in lengths.tolist()
    ]
    parts = np.stack([np.ones(len(lengths)), lengths / 2, -1 / lengths])
    return _fitted(parts, np.array(saved) / lengths)


def swap_seconds(executor: Timed, num_blocks: int) -> float:
    """So many blocks to the host and back, which leaves them as they are; alone on the device."""
    copies = [Copy(block, block) for block in range(num_blocks)]
    return _least(
        lambda: (
            _seconds(executor, [Plan(0, copies_out=copies)])
            + _seconds(executor, [Plan(0, copies_in=copies)])
        )
    )


def recompute_seconds(executor: Timed, config: Config, num_tokens: int) -> float:
    """A prompt of so many tokens, in pieces as the scheduler cuts them; alone on the device."""
    pieces, start = list[tuple[int, int]](), 0
    while start < num_tokens:
        most = min(num_tokens - start, config.max_num_batched_tokens)
        size = config.chunk(num_tokens - start, config.max_num_batched_tokens, True)
        pieces.append((start, start + (min(size, most) if size > 0 else most)))
        start = pieces[-1][1]
    return _prefill_seconds(executor, config, num_tokens, pieces)


def resume_seconds(executor: Timed, config: Config, num_tokens: int) -> float:
    """The last of so many tokens, as for a request that is back from the host."""
    return _prefill_seconds(executor, config, num_tokens, [(num_tokens - 1, num_tokens)])


def finish(executor: Executor) -> None:
    """Wait for copies to the host, which an executor may leave behind when a plan is done."""
    if swapper := getattr(executor, "swapper", None):
        swapper.finish()


def _prefill_seconds(
    executor: Timed, config: Config, num_tokens: int, pieces: Sequence[tuple[int, int]]
) -> float:
    """Pieces [start, end) of one prompt, a plan each; nothing is sampled."""
    request = Request("probe", [place % 32 for place in range(num_tokens)], Params())
    request.row, request.limit = 0, num_tokens + 1
    request.kv.blocks = list(range(-(-num_tokens // config.block_size)))
    plans = [Plan(0, chunks=[Chunk(request, a, b, a, False)]) for a, b in pieces]
    plans[0].admitted = [Admission(request, pieces[0][0], 0, False)]
    mixed = getattr(executor, "mixed", None)
    with mixed.in_own_graphs() if mixed else nullcontext():
        return _least(lambda: _seconds(executor, plans))


def _least(measure: Callable[[], float]) -> float:
    """The best of a few tries: what else happens on a machine only ever adds.

    The first may compile what it needs and the second capture it, so tries go on while they get
    better.
    """
    found = [measure()]
    while len(found) < MAX_TRIES:
        best = min(found)
        found.append(measure())
        is_enough = len(found) >= FEW_TRIES or found[-1] >= LONG_ENOUGH
        if is_enough and found[-1] >= ALIKE * best:
            break
    return min(found)


def _seconds(executor: Timed, plans: Sequence[Plan]) -> float:
    """From the first launch until all of it is done, on the host too."""
    begun = executor.now()
    for handle in [executor.launch(plan) for plan in plans]:
        handle.wait()
    finish(executor)
    return executor.now() - begun


def _spread(most: int) -> list[int]:
    """Sizes up to `most`, a few times apart."""
    return sorted({max(1, most // share) for share in (64, 16, 4, 2, 1)})


def _fitted(parts: Numbers, wholes: Numbers) -> list[float]:
    """How often to take each part so that they add up to the wholes as nearly as can be.

    Never less than 0 times: of all ways to leave some out, the nearest that needs no less.
    """
    best, least = np.zeros(len(parts)), float(np.sum(wholes**2))
    for chosen in product((False, True), repeat=len(parts)):
        times = np.zeros(len(parts))
        times[list(chosen)] = np.linalg.lstsq(parts[list(chosen)].T, wholes, rcond=None)[0]
        error = float(np.sum((times @ parts - wholes) ** 2))
        if times.min() >= 0 and error < least:
            best, least = times, error
    return [float(times) for times in best]
