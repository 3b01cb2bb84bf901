"""Decides whether a device is usable after an error, and explains the error.

Some errors end with the call that raised them: the device ran out of memory, or a launch was
rejected. Others make the CUDA context unusable: after an illegal memory access every call fails,
with a message about some other call. A probe tells the two apart, and the first reason is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headway.errors import ExecutorError
from headway.model.devices import is_out_of_memory, shortened

ADVICE = "lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"


class Faults:
    """Tracks whether a device is usable."""

    def __init__(self, probe: Callable[[], None], discard: Callable[[], None]) -> None:
        self.probe = probe  # waits until the device is idle; raises if it is unusable
        self._discard = discard  # drops the state of an interrupted launch
        self._unusable_reason: str | None = None  # why the context is unusable

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guard work on the device: after an error, act as if the work had not been started.

        Raise ExecutorError at once if the context is already unusable: the work would fail with
        an unrelated message.
        """
        if self._unusable_reason:
            raise ExecutorError(self._unusable_reason)
        try:
            yield
        except Exception as error:
            self._discard()
            self._explain(error)
            raise
        except BaseException:  # such as KeyboardInterrupt: the device is fine
            self._discard()
            raise

    def _explain(self, error: Exception) -> None:
        """Raise an ExecutorError if it can say more than the error itself."""
        try:
            self.probe()
        except Exception:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._unusable_reason = (
                f"the CUDA context is unusable after this error: {reason}; restart the process"
            )
            raise ExecutorError(self._unusable_reason) from error
        if is_out_of_memory(error):
            detail = shortened(str(error))
            raise ExecutorError(f"out of GPU memory in a step: {detail}; {ADVICE}") from error


def idle_probe(device: torch.device) -> Callable[[], None]:
    return lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None
