"""How often drafts are right, as text: `0.7`, or `hist(0.3,0.2,0.5)` for 0, 1 and 2 right ones."""

from __future__ import annotations

import re

from headway.checks import real_number
from headway.errors import ConfigError
from headway.executor.simulated import Acceptance, Histogram, Independent

MAX_WEIGHTS = 129  # a step verifies at most 128 drafts of a request


def read_acceptance(text: str, seed: int = 0) -> Acceptance:
    """ConfigError if the text is not a probability or a histogram."""
    listed = re.fullmatch(r"hist\((.*)\)", text.strip())
    if listed is None:
        return independent(_number(text), seed)
    weights = tuple(_number(part) for part in listed[1].split(","))
    if not any(weights) or len(weights) > MAX_WEIGHTS:
        raise ConfigError(
            f"accept: hist must have 1 to {MAX_WEIGHTS} weights that are not all 0, not {text!r}"
        )
    return Histogram(weights, seed)


def independent(share: float, seed: int = 0) -> Independent:
    """Drafts that are right with this probability; ConfigError unless it is in [0, 1]."""
    return Independent(real_number("accept", share, low=0, high=1), seed)


def format_acceptance(accept: Acceptance) -> str:
    """The text that `read_acceptance` reads."""
    if isinstance(accept, Histogram):
        return f"hist({','.join(f'{weight:.12g}' for weight in accept.weights)})"
    assert isinstance(accept, Independent), "a workload has no other kinds"
    return repr(accept.share)


def _number(text: str) -> float:
    if not re.fullmatch(r"\s*([0-9]{1,15}(\.[0-9]*)?|\.[0-9]+)(e-?[0-9]{1,2})?\s*", text):
        raise ConfigError(f"accept: {text!r} is not a number of at least 0")
    return float(text)
