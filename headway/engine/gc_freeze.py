"""Shorter garbage collection pauses: a full collection of a loaded model stops all threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
