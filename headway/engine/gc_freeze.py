"""Garbage collection looks at all that is loaded now and then, and everybody waits meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Leave all that is there by now out of it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
