"""Prompt lookup: a request goes on as it did after an earlier occurrence of its last tokens.

Keeps no state and searches the whole text each time. One comparison of arrays finds the occurrences
of all lengths, so the time does not depend on the tokens: a search of their bytes would be slow for
texts whose bytes match where the tokens do not.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from headway.checks import Checked, count
from headway.errors import ConfigError
from headway.request import Request


@dataclass(frozen=True)
class ngram(Checked):
    """Draft what followed the latest earlier occurrence of the last `max` to `min` tokens."""

    min: int = count(2, 1)
    max: int = count(4, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max < self.min:
            raise ConfigError(f"ngram: max must be at least min ({self.min}), not {self.max}")

    def __call__(self) -> NgramDrafter:
        return NgramDrafter(self)


@dataclass(frozen=True)
class NgramDrafter:
    """The drafter of the rule `ngram`."""

    rule: ngram

    def propose(self, request: Request, most: int) -> array[int]:
        """The tokens after the latest occurrence of the longest n-gram that occurs earlier.

        A copy that reaches the end of the text goes on with what it has copied, so a text that
        repeats itself is continued with its period.
        """
        tokens = request.tokens
        start = _latest_continuation(tokens, self.rule.min, self.rule.max)
        if most < 1 or start is None:
            return array("i")
        copied = tokens[start : start + most]
        return (copied * -(-most // len(copied)))[:most]

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def _latest_continuation(tokens: array[int], least: int, most: int) -> int | None:
    """The place after the latest earlier occurrence of the last n tokens; None if there is none.

    n is the largest number in [least, most] for which there is one.
    """
    known = np.frombuffer(tokens, dtype=np.intc)
    found = None
    starts = np.ones(len(known), dtype=np.bool_)  # where the last n tokens occur
    for n in range(1, min(most, len(known) - 1) + 1):
        starts = starts[1:] & (known[:-n] == known[-n])
        latest = starts.tobytes().rfind(1)
        if latest < 0:
            break
        if n >= least:
            found = latest + n
    return found
