"""What an error of a device means: for the steps that come after it, and in words.

Some errors end with the call that raised them: memory ran out, a launch was refused. Others stay for
as long as the process lives: once a kernel went astray, every call fails, and what it says is not
about that call. A probe tells the two apart, and the first reason is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headway.errors import ExecutorError
from headway.model.devices import is_out_of_memory, shortened

ADVICE = "lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"


class Faults:
    """Knows whether a device can still be used."""

    def __init__(self, probe: Callable[[], None], forget: Callable[[], None]) -> None:
        self.probe = probe  # waits until the device is idle; raises if nothing works any more
        self._forget = forget  # what was being told to the device
        self._lost: str | None = None  # why nothing works any more

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around work on the device: an error leaves it as if the work had not been begun.

        ExecutorError at once if the device was lost before: it would fail for some other reason.
        """
        if self._lost:
            raise ExecutorError(self._lost)
        try:
            yield
        except Exception as error:
            self._forget()
            self._explain(error)
            raise
        except BaseException:  # a key press: nothing is wrong with the device
            self._forget()
            raise

    def _explain(self, error: Exception) -> None:
        """ExecutorError in better words than the error's own, where there are any."""
        try:
            self.probe()
        except Exception:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._lost = f"the device is lost to this process ({reason}): start the program again"
            raise ExecutorError(self._lost) from error
        if is_out_of_memory(error):
            said = shortened(str(error))
            raise ExecutorError(f"a step ran out of memory: {said}; {ADVICE}") from error


def idle(device: torch.device) -> Callable[[], None]:
    """A probe: waits for all that the device was given."""
    return lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None
