"""The systems of the field, each as one value for every slot, and slots by name.

Any slot value can be written as text: `fcfs`, `watermark(0.05)`, `back_off(watermark(0.02))`, or
`module:function` for one's own. `describe` writes a config back as such text.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from headway.config import Config
from headway.errors import ConfigError
from headway.scheduler import peak, policies, queues

SLOTS: dict[str, tuple[Any, ...]] = {
    "recipe": (
        policies.mixed, policies.swapped_first, policies.prefill_first,
        policies.charged_in_full, policies.static,
    ),
    "queue": (
        queues.fcfs, queues.priority, queues.shortest_first, queues.fair, queues.deadline,
        queues.custom,
    ),
    "chunk": (policies.whole, policies.split_first, policies.split_any, policies.at_most),
    "headroom": (
        policies.watermark, policies.reserve_outputs, peak.future_peak, policies.back_off,
    ),
    "victim": (
        policies.served_last, policies.newest, policies.least_work, policies.lowest_priority,
        policies.fewest_lost,
    ),
    "swap": (policies.recompute, policies.swap, policies.cheaper),
}  # fmt: skip
PARTS: tuple[Any, ...] = (peak.limit, peak.learned)  # estimates, used inside future_peak
NUMBERS = tuple(f.name for f in fields(Config) if f.default is not MISSING)

PRESETS: dict[str, dict[str, str | int]] = {
    "headway": {
        "recipe": "swapped_first", "queue": "shortest_first", "chunk": "split_any",
        "headroom": "future_peak(learned)", "victim": "served_last", "swap": "cheaper",
    },
    "nano_vllm": {
        "recipe": "prefill_first", "queue": "fcfs", "chunk": "split_first",
        "headroom": "watermark(0.0)", "victim": "newest", "swap": "recompute",
        "max_requests": 512, "max_tokens": 16384,
    },
    "deep_dive": {
        "recipe": "mixed", "queue": "fcfs", "chunk": "split_any",
        "headroom": "reserve_outputs(1.0)", "victim": "newest", "swap": "recompute",
    },
    "vllm": {
        "recipe": "swapped_first", "queue": "fcfs", "chunk": "split_any",
        "headroom": "back_off(watermark(0.01))", "victim": "newest", "swap": "cheaper",
        "max_requests": 256, "max_tokens": 8192,
    },
    "vllm_v1": {
        "recipe": "mixed", "queue": "fcfs", "chunk": "split_any",
        "headroom": "watermark(0.0)", "victim": "newest", "swap": "recompute",
        "max_requests": 256, "max_tokens": 8192,
    },
    "minivllm": {
        "recipe": "charged_in_full", "queue": "fcfs", "chunk": "whole",
        "headroom": "watermark(0.0)", "victim": "newest", "swap": "recompute",
        "max_requests": 512, "max_tokens": 16384,
    },
    "static": {
        "recipe": "static", "queue": "fcfs", "chunk": "split_any",
        "headroom": "reserve_outputs(1.0)", "victim": "newest", "swap": "recompute",
    },
}  # fmt: skip
DEFAULT = "headway"


def preset(name: str = DEFAULT, **changes: Any) -> Config:
    """A preset's config, with any slot (a value or its text) or number replaced."""
    values: dict[str, Any] = {**_find(name, PRESETS, "preset"), **changes}
    for field in values:
        if field not in SLOTS and field not in NUMBERS:
            raise ConfigError(_unknown(field, (*SLOTS, *NUMBERS), "slot or number"))
    return Config(**{k: slot(k, v) if k in SLOTS else v for k, v in values.items()})


def slot(name: str, value: Any) -> Any:
    """A slot's value from its text; anything but text is taken as it is."""
    if name not in SLOTS:
        raise ConfigError(_unknown(name, tuple(SLOTS), "slot"))
    if isinstance(value, str):
        value = _own(value) if ":" in value else _parse(name, value)
    if isinstance(value, type):  # a rule with numbers, named without them
        value = value()
    if name == "queue" and not hasattr(value, "outranks"):
        value = queues.custom(function=value)
    if not hasattr(value, "outranks") and not callable(value):
        raise ConfigError(f"{name}: {value!r} is not a function")
    return value


def describe(config: Config) -> dict[str, str | int]:
    """Every slot and number as text and integers; `preset(**describe(config))` gives it back."""
    described = {f.name: _text(getattr(config, f.name)) for f in fields(config)}
    return {k: v if k in SLOTS else int(v) for k, v in described.items()}


def _text(value: Any) -> str:
    if isinstance(value, queues.custom):
        return _text(value.function)
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{f.name}={_text(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inner})"
    if not callable(value):
        return repr(value)
    ready_made = any(value in group for group in (*SLOTS.values(), PARTS))
    return value.__name__ if ready_made else f"{value.__module__}:{value.__qualname__}"


def _parse(name: str, text: str) -> Any:
    known = {f.__name__: f for f in (*SLOTS[name], *(PARTS if name == "headroom" else ()))}
    try:
        return _evaluate(ast.parse(text, mode="eval").body, known, name)
    except SyntaxError:
        raise ConfigError(f"{name}: cannot read {text!r}; write a name or name(number)") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: {text}: {error}") from None


def _evaluate(node: ast.expr, known: Mapping[str, Any], name: str) -> Any:
    """Names, calls of names and literals; nothing else is evaluated."""
    if isinstance(node, ast.Name):
        return _find(node.id, known, name)
    if isinstance(node, ast.Call):
        function = _evaluate(node.func, known, name)
        positional = [_evaluate(arg, known, name) for arg in node.args]
        named = {k.arg or "": _evaluate(k.value, known, name) for k in node.keywords}
        arguments = [a() if isinstance(a, type) else a for a in positional]
        return function(*arguments, **named)
    return ast.literal_eval(node)


def _own(text: str) -> Any:
    """A user's own policy, `module:function`."""
    module, _, attribute = text.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load policy {text!r}: {error}") from None


def _find(name: str, known: Mapping[str, Any], what: str) -> Any:
    if name not in known:
        raise ConfigError(_unknown(name, tuple(known), what))
    return known[name]


def _unknown(name: str, known: tuple[str, ...], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown {what} {name!r}{hint} Known: {', '.join(known)}"
