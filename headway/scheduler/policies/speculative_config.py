"""vLLM's `speculative_config` as values of the slots `draft` and `drafter`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headway.checks import real_number, whole_number
from headway.errors import ConfigError, shorten
from headway.scheduler.policies.draft import MAX_DRAFTS

NAME = "speculative_config"
NUM_TOKENS = "num_speculative_tokens"
DEPTH, NUM_CACHED, FACTOR, PROBABILITY = (
    f"suffix_decoding_{name}"
    for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
)
LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
MAX_LENGTH = (1 << 31) - 1
BY_COST = "the length of a draft follows from the costs of the step, also in large batches"
REFUSED = {
    "disable_by_batch_size": BY_COST,
    "speculative_disable_by_batch_size": BY_COST,
    "num_speculative_tokens_per_batch_size": BY_COST,
    "model": "a draft is made from texts, not by a second model",
}
Config = Mapping[str, Any]


def with_speculative_config(changes: Mapping[str, Any], given: object) -> dict[str, Any]:
    """Changes of a preset, with the slots that a `speculative_config` describes.

    `given` is a mapping, its JSON, or None. ConfigError if it is invalid or not supported, or if
    the changes have one of the slots.
    """
    if given is None:
        return dict(changes)
    slots = _slots(given)
    for name in slots:
        if changes.get(name) is not None:
            both = f"{NAME} and {name} {shorten(changes[name])}"
            raise ConfigError(f"{both} exclude each other; use one of them")
    return {**changes, **slots}


def _slots(given: object) -> dict[str, str]:
    config = _mapping(given)
    method = config.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{NAME}: method must be {' or '.join(METHODS)}, not {shorten(method)}")
    for name, reason in REFUSED.items():
        if name in config:
            raise ConfigError(f"{NAME}: {name} is not supported: {reason}; leave it out")
    names, read = METHODS[method]
    known = ("method", NUM_TOKENS, *names)
    if unknown := sorted(map(str, config.keys() - set(known))):
        listed = ", ".join(known)
        raise ConfigError(f"{NAME}: {method} has no {unknown[0]}; known: {listed}")
    most, drafter = read(config)
    return {"draft": f"by_cost(most={most})", "drafter": drafter}


def _mapping(given: object) -> dict[str, Any]:
    """The members that have a value."""
    config = given
    if isinstance(given, str):
        try:
            config = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{NAME} is not valid JSON: {error}") from None
    if not isinstance(config, Mapping):
        wanted = 'an object, such as {"method": "ngram", "num_speculative_tokens": 4}'
        raise ConfigError(f"{NAME} must be {wanted}, not {shorten(given)}")
    return {key: value for key, value in config.items() if value is not None}


def _whole(config: Config, name: str, default: int, low: int, high: int = MAX_LENGTH) -> int:
    return whole_number(f"{NAME}: {name}", config.get(name, default), low, high)


def _ngram(config: Config) -> tuple[int, str]:
    if NUM_TOKENS not in config:
        raise ConfigError(f"{NAME}: {NUM_TOKENS} is missing; the method ngram needs it")
    given = [config[name] for name in LOOKUP if name in config] or [5]
    low, high = (_whole(config, name, given[0], 1) for name in LOOKUP)
    if low > high:
        raise ConfigError(f"{NAME}: {LOOKUP[0]} must be at most {LOOKUP[1]} ({high}), not {low}")
    return _whole(config, NUM_TOKENS, 0, 1, MAX_DRAFTS), f"ngram({low}, {high})"


def _suffix(config: Config) -> tuple[int, str]:
    depth = _whole(config, DEPTH, 24, 1)
    most = _whole(config, NUM_TOKENS, min(depth, MAX_DRAFTS), 1, MAX_DRAFTS)
    factor = real_number(f"{NAME}: {FACTOR}", config.get(FACTOR, 1.0), low=0)
    least = real_number(f"{NAME}: {PROBABILITY}", config.get(PROBABILITY, 0.1), low=0, high=1)
    shared = _whole(config, NUM_CACHED, 10_000, 0) > 0
    rule = f"suffix(factor={factor!r}, min_probability={least!r}, shared={shared})"
    return min(most, depth), rule


# What a method has besides NUM_TOKENS, and what reads it: the longest draft, and the drafter.
METHODS: dict[str, tuple[tuple[str, ...], Callable[[Config], tuple[int, str]]]] = {
    "ngram": (LOOKUP, _ngram),
    "suffix": ((DEPTH, NUM_CACHED, FACTOR, PROBABILITY), _suffix),
}
