"""Fills the cache of Hypothesis in a new checkout.

It holds which characters UTF-8 can encode and the constants of all source files, which Hypothesis
tries as values. Otherwise every process of a session computes both, in 5 s of CPU time each.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from hypothesis import strategies
from hypothesis.configuration import storage_directory

ROOT = Path(__file__).parents[2]
PLACES = ("headway", "tests")


def fill_cache() -> None:
    """Compute what is missing; does nothing if the cache exists."""
    if storage_directory("constants").path.exists():
        return
    strategies.text().validate()
    try:
        from hypothesis.internal.constants_ast import constants_from_module
    except ImportError:  # another version; the cache only saves time
        return
    for path in (file for place in PLACES for file in (ROOT / place).rglob("*.py")):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)
