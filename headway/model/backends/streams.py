"""Runs independent kernels of a GPU at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def run_beside(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both; later work waits for both. The second fills what the first leaves of the GPU.

    One after the other on a CPU, and inside a captured graph, whose passes are too short for a
    gain.
    """
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        first()
        second()
        return
    main, side = torch.cuda.current_stream(), _side_stream(torch.cuda.current_device())
    side.wait_stream(main)
    try:
        first()
        with torch.cuda.stream(side):
            second()
    finally:  # also if the launch is interrupted
        main.wait_stream(side)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
