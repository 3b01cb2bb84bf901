"""Shorter garbage collection pauses: a full collection of a loaded model stops all threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_frozen = False


@contextmanager
def gc_freeze() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection; nothing to do if nested."""
    global _is_frozen
    if _is_frozen:
        yield
        return
    gc.collect()
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        _is_frozen = False
        gc.unfreeze()
