"""Which layers have a sliding window, from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headway.model.families.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
# The layers with a window of a config.json that does not list the types of its layers.
WindowRule = Callable[[Fields, int], frozenset[int]]


def no_layer(fields: Fields, num_layers: int) -> frozenset[int]:
    """The rule of families without windows: a config.json with one in force is refused."""
    return frozenset()


def every_layer(fields: Fields, num_layers: int) -> frozenset[int]:
    return frozenset(range(num_layers))


def after_max_window_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Qwen's rule: the layers from `max_window_layers` on."""
    return frozenset(range(fields.count("max_window_layers", 28, minimum=0), num_layers))


def all_but_every(period: int) -> WindowRule:
    """Every `sliding_window_pattern`-th layer sees all tokens."""

    def rule(fields: Fields, num_layers: int) -> frozenset[int]:
        key = "_sliding_window_pattern"  # transformers wrote both names
        stated = fields.count("sliding_window_pattern", fields.count(key, period))
        return frozenset(number for number in range(num_layers) if (number + 1) % stated)

    return rule


class Windows(NamedTuple):
    """Sliding windows of layers; the fields of Variant with the same names."""

    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    attention_window: int | None = None


def windows_from_hf(fields: Fields, rule: WindowRule) -> Windows:
    """The windows that hide tokens in a context of the full length."""
    num_layers, kinds = fields.count("num_hidden_layers"), fields.get("layer_types")
    layers = rule(fields, num_layers)
    if kinds is not None:
        layers = _listed(fields, kinds, num_layers)
    is_used, is_stated = fields.get("use_sliding_window", True), fields.get("sliding_window")
    if not is_used or is_stated is None:
        return Windows()
    window, length = fields.count("sliding_window"), fields.count("max_position_embeddings")
    if window >= length:
        return Windows()
    if rule is no_layer:
        raise fields.error(
            f"sliding_window {window} is below max_position_embeddings {length}: sliding-window "
            "attention is not supported for this architecture"
        )
    if len(layers) == num_layers:
        return Windows(attention_window=window)
    return Windows(window, layers) if layers else Windows()


def _listed(fields: Fields, kinds: object, num_layers: int) -> frozenset[int]:
    if (
        isinstance(kinds, list)
        and len(kinds) == num_layers
        and all(kind in (FULL, SLIDING) for kind in kinds)
    ):
        return frozenset(number for number, kind in enumerate(kinds) if kind == SLIDING)
    raise fields.error(
        f"layer_types is {kinds!r}; it must be a list of {num_layers} entries, each {FULL} or "
        f"{SLIDING}"
    )


def windows_from_gguf(fields: Fields, period: int) -> Windows:
    """The same from GGUF metadata, whose pattern is a period or a list."""
    num_layers = fields.count("block_count")
    window = fields.count("attention.sliding_window", 0, minimum=0)
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.error(
                f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        layers = frozenset(number for number, is_windowed in enumerate(pattern) if is_windowed)
    else:
        stated = fields.count("attention.sliding_window_pattern", period)
        layers = frozenset(number for number in range(num_layers) if (number + 1) % stated)
    if not window or not layers:
        return Windows()
    if len(layers) == num_layers:
        raise fields.error(
            f"all {num_layers} layers have a sliding window; at least one must see all tokens"
        )
    return Windows(window, layers)
