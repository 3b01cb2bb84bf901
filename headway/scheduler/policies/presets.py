"""Presets: schedulers of known systems, each as one value per slot; and slot values by name.

A slot value can be written as text: `fcfs`, `watermark(0.05)`, `back_off(watermark(0.02))`, or
`module:function` for a user's function, which is imported.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from headway.config import Config
from headway.drafters.model import model
from headway.drafters.ngram import ngram
from headway.drafters.repeat import repeat_last
from headway.drafters.suffix import suffix
from headway.errors import ConfigError, OwnPolicyError, shorten
from headway.scheduler.policies import batching, chunk, draft, headroom, queue, swap, text, victim
from headway.scheduler.policies.text import ANY, READY_MADE

SLOTS: dict[str, tuple[Any, ...]] = {
    "batching": (
        batching.mixed, batching.swapped_first, batching.prefill_first,
        batching.prefill_first_charge_cached, batching.static,
    ),
    "queue": (
        queue.fcfs, queue.priority, queue.shortest_first, queue.fair, queue.earliest_deadline,
        queue.custom,
    ),
    "chunk": (chunk.whole, chunk.split_first, chunk.split_any, chunk.at_most, chunk.hold_tbt),
    "headroom": (
        headroom.watermark, headroom.reserve_outputs, headroom.future_peak, headroom.back_off,
    ),
    "victim": (
        victim.served_last, victim.newest, victim.least_work, victim.fewest_generated,
        victim.lowest_priority, victim.fewest_private_blocks,
    ),
    "swap": (swap.recompute, swap.swap, swap.swap_if_cheaper, swap.discard_output),
    "draft": (draft.fixed, draft.by_cost),
    "drafter": (ngram, suffix, model, repeat_last),
}  # fmt: skip
QUEUE_RULE = ("max_overtakes", "keys_change", "preempts", "group", "outranks")  # besides `key`
ARGUMENTS = {"batching": "step", "chunk": "want left is_first"} | dict.fromkeys(
    ("queue", "headroom", "victim", "swap"), "request view"
)
ARGUMENTS |= {"draft": "request step", "drafter": ""}
NONE = "none"  # the text of an empty slot
OPTIONAL = ("draft", "drafter")  # slots that may be empty
PARTS: tuple[Any, ...] = (headroom.limit, headroom.learned)  # estimates, arguments of future_peak
OF_MODEL = ("sliding_window", "num_window_blocks")  # set by the model that runs, not by users
NUMBERS = tuple(
    f.name
    for f in fields(Config)
    if f.default is not MISSING and f.name not in (*OF_MODEL, *OPTIONAL)
)

PLAIN: dict[str, str | int] = {
    "batching": "mixed", "queue": "fcfs", "chunk": "split_any",
    "headroom": "watermark(0.0)", "victim": "newest", "swap": "recompute",
    "draft": NONE, "drafter": NONE,
}  # fmt: skip
PRESETS: dict[str, dict[str, str | int]] = {
    "headway": PLAIN | {
        "batching": "swapped_first", "queue": "shortest_first",
        "headroom": "future_peak(learned)", "swap": "swap_if_cheaper",
    },
    "nano_vllm": PLAIN | {
        "batching": "prefill_first", "chunk": "split_first",
        "max_num_seqs": 512, "max_num_batched_tokens": 16384,
    },
    "deep_dive": PLAIN | {"headroom": "reserve_outputs(1.0)"},
    "vllm": PLAIN | {
        "batching": "swapped_first", "headroom": "back_off(watermark(0.01))",
        "swap": "swap_if_cheaper", "max_num_seqs": 256, "max_num_batched_tokens": 8192,
    },
    "vllm_v1": PLAIN | {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "minivllm": PLAIN | {
        "batching": "prefill_first_charge_cached", "chunk": "whole",
        "max_num_seqs": 512, "max_num_batched_tokens": 16384,
    },
    "static": PLAIN | {"batching": "static", "headroom": "reserve_outputs(1.0)"},
}  # fmt: skip
DEFAULT = "headway"
NUM_REMEMBERED = 256  # texts of policies


def preset(name: str = DEFAULT, **changes: Any) -> Config:
    """The config of a preset, with any slot (a value or its text) or number replaced.

    A text `module:function` is imported; use `read_preset` for texts that the user did not type.
    """
    return read_preset(changes, name, own=ANY)


def read_preset(
    changes: Mapping[str, object], name: str = DEFAULT, *, own: Container[str] = READY_MADE
) -> Config:
    """The config of a preset with changes from data: a link, a trace, a message.

    `own` has the `module:function` that may be imported; OwnPolicyError for another one.
    """
    values: Mapping[str, Any] = {**text.lookup("preset", name, PRESETS), **changes}
    for field in values:
        text.lookup("slot or number", field, dict.fromkeys((*SLOTS, *NUMBERS, *OF_MODEL)))
    check_own_policies(own, values)
    return Config(**{k: slot(k, v, own) if k in SLOTS else v for k, v in values.items()})


def own_policies(*settings: Mapping[str, object]) -> set[str]:
    """Every `module:function` that these settings name."""
    texts = (v for each in settings for k, v in each.items() if k in SLOTS and isinstance(v, str))
    return {name for name in map(text.own_name, texts) if name}


def check_own_policies(own: Container[str], *settings: Mapping[str, object]) -> None:
    """OwnPolicyError if these settings name a `module:function` that is not in `own`."""
    if refused := [name for name in sorted(own_policies(*settings)) if name not in own]:
        raise OwnPolicyError(refused)


def read_changes(texts: Mapping[str, str]) -> dict[str, str | int]:
    """Changes for `preset`, from texts such as {"max_num_seqs": "64"}; ConfigError if one is wrong.

    Policies stay texts, which `preset` reads.
    """
    known = dict.fromkeys((*SLOTS, *NUMBERS))
    changes: dict[str, str | int] = {}
    for name, value in texts.items():
        text.lookup("slot or number", name, known)
        try:
            changes[name] = int(value) if name in NUMBERS else value
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, not {value!r}") from None
    return changes


def slot(name: str, value: Any, own: Container[str] = READY_MADE) -> Any:
    """The value of a slot; text is read, any other value is checked and used."""
    if name in OPTIONAL and value in (None, NONE):
        return None
    if isinstance(value, str) and not text.own_name(value):  # a user's module may change
        return _ready_made(name, value)
    return _read_slot(name, value, own)


def _read_slot(name: str, value: Any, own: Container[str] = READY_MADE) -> Any:
    ready_made = text.lookup("slot", name, SLOTS)
    if isinstance(value, str):
        parts = {"future_peak": text.named(PARTS)} if name == "headroom" else {}
        value = text.parse_policy(name, value, text.named(ready_made), parts, own)
    if any(value is part or type(value) is part for part in PARTS):
        raise ConfigError(f"{name}: {shorten(value)} is an estimate; use future_peak(estimate)")
    value = text.instantiate(value)
    if name == "queue" and hasattr(value, "key"):
        if missing := [each for each in QUEUE_RULE if not hasattr(value, each)]:
            raise ConfigError(f"queue: {shorten(value)} has no {missing[0]}; see config.QueueRule")
        return value
    text.check_arguments(name, value, ARGUMENTS[name])
    return queue.custom(function=value) if name == "queue" else value


# Policies keep no state, so that many schedulers can use one.
_ready_made = lru_cache(NUM_REMEMBERED)(_read_slot)


def describe(config: Config) -> dict[str, str | int]:
    """All slots as text and all numbers; `preset(**describe(config))` restores the config.

    Only a user's function in `custom` with `max_overtakes` has a text that cannot be read back.
    Numbers of sliding-window layers are left out if there are no such layers.
    """
    known = [policy for group in (*SLOTS.values(), PARTS) for policy in group]
    hidden = () if config.sliding_window else OF_MODEL
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in hidden}
    if isinstance(config.queue, queue.custom) and not config.queue.max_overtakes:
        values["queue"] = config.queue.function
    values |= {name: NONE for name in OPTIONAL if values[name] is None}
    is_policy = {k: k in SLOTS and v != NONE for k, v in values.items()}
    return {k: text.format_policy(v, known) if is_policy[k] else v for k, v in values.items()}
