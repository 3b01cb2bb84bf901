"""Knobs and their values: what `sweep` runs in full and `tune` searches.

A knob is `preset`, a slot or a number of the scheduler. `speed` and `seed` are knobs of the workload,
for sweeps. A value of a slot may have arguments, so values are split at commas outside parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

from headway.checks import real_number, whole_number
from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.planner.evaluate import Settings, make_config
from headway.scheduler.policies import text as policy_text
from headway.scheduler.policies.presets import NUMBERS, PRESETS, SLOTS

Space = dict[str, list[Any]]
WORKLOAD_KNOBS = ("speed", "seed")
KNOBS = ("preset", *SLOTS, *NUMBERS)
MAX_POINTS = 10_000
DRAFT_RULES = ["none", "by_cost", "fixed(1)", "fixed(3)"]


def parse_knobs(texts: Iterable[str], known: Sequence[str] = KNOBS) -> Space:
    """The values of "knob=a,b" texts; ConfigError names an unknown knob, value or repetition."""
    space: Space = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise ConfigError(f"a knob must look like name=value,value, not {text!r}")
        policy_text.lookup("knob", name, dict.fromkeys(known))
        if name in space:
            raise ConfigError(f"knob {name} is given twice")
        space[name] = [_value(name, each) for each in split_values(values)]
        if len(set(space[name])) < len(space[name]):
            raise ConfigError(f"knob {name} has a value twice: {values}")
    return space


def split_values(text: str) -> list[str]:
    """The parts between commas outside parentheses."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and parts[-1].count("(") != parts[-1].count(")"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return [part.strip() for part in parts]


def _value(name: str, text: str) -> Any:
    if name == "preset":
        policy_text.lookup("preset", text, PRESETS)
        return text
    if name in SLOTS:
        return text
    if name == "speed":
        is_number = re.fullmatch(r"\d+\.?\d*|\.\d+", text)
        return real_number("speed", float(text) if is_number else text, above=0)
    if not re.fullmatch(r"-?\d{1,15}", text):
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return whole_number(name, int(text), 0) if name == "seed" else int(text)


def points(space: Space) -> list[Settings]:
    """Every combination of the values, the last knob changing fastest."""
    total = prod(map(len, space.values()))
    if total > MAX_POINTS:
        raise ConfigError(f"the knobs have {total} combinations; at most {MAX_POINTS} can be run")
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def check(space: Space, base: Settings, profile: Profile) -> Space:
    """The space, if every value is valid with the base settings; ConfigError otherwise."""
    for name, values in space.items():
        for value in values:
            if name not in WORKLOAD_KNOBS:
                make_config({**base, name: value}, profile)
    return space


def default_space(config: Config, *, has_drafts: bool = False) -> Space:
    """The knobs and values that `tune` searches; host memory as multiples of the device's.

    Drafts are one of them only if the workload says how often they are right.
    """
    blocks = config.num_blocks
    space: Space = {
        "preset": list(PRESETS),
        "batching": ["mixed", "swapped_first", "prefill_first"],
        "queue": ["fcfs", "shortest_first"],
        "chunk": [
            "split_any", *(f"at_most({n})" for n in (128, 256, 512, 1024, 2048)),
            *(f"hold_tbt({seconds})" for seconds in (0.03, 0.1)),
        ],
        "headroom": [
            "watermark(0.0)", "watermark(0.01)", "watermark(0.05)", "reserve_outputs(0.5)",
            "reserve_outputs(1.0)", "future_peak(learned)", "back_off(watermark(0.01))",
        ],
        "victim": ["newest", "least_work", "fewest_generated"],
        "swap": ["recompute", "swap_if_cheaper"],
        "max_num_seqs": [16, 32, 64, 128, 256, 512, 1024],
        "max_num_batched_tokens": [256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
        "num_host_blocks": [0, blocks // 2, blocks, 2 * blocks],
    }  # fmt: skip
    return {**space, "draft": DRAFT_RULES} if has_drafts else space


def neighbours(values: list[Any], now: Any) -> list[Any]:
    """The values to try next: those beside a number, or all others."""
    if not all(isinstance(value, int) for value in values) or not isinstance(now, int):
        return [value for value in values if value != now]
    below = sorted(value for value in values if value < now)
    above = sorted(value for value in values if value > now)
    return below[-1:] + above[:1]


def text_of(settings: Settings) -> str:
    """Settings on one line; "defaults" without any."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"
